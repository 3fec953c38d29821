"""Prompt chunks that all replicas compute together."""
