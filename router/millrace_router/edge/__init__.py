"""What clients and operators reach: gRPC, HTTP, and who may call."""
