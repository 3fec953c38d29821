"""The public side: gRPC and HTTP for clients and operators, API keys."""
