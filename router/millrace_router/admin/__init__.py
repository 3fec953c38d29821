"""The operators' ports: gRPC, HTTP, and a page for a browser."""
