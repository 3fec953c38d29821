"""Copies of cached pages in the host's memory and on disk."""
