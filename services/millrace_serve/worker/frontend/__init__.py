"""The frontend process of a worker: gRPC, no tensors."""
