"""Experts counted, placed and moved by their load."""
