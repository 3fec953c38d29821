"""Attention of prompt chunks that all replicas compute together."""
