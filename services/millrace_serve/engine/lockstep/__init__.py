"""Ranks that step together: how they find each other, agree, and share batches."""
