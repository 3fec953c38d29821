"""Checkpoints are made here: quantised ones, and shards of any tensors."""
