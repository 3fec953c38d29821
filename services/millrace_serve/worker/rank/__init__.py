"""A rank process of a worker: tensors, no gRPC."""
