"""Whole servers before the same requests and the same faults, over OpenAI's HTTP API (docs/duel.md)."""
