"""millrace.v1.Inference over gRPC."""
