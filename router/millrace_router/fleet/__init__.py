"""The workers of this router, and their connections."""
