"""Grammars of requests."""
