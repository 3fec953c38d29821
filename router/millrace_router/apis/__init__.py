"""The public APIs: OpenAI's and Anthropic's over HTTP, and ours over gRPC."""
