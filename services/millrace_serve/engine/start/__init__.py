"""A rank's way from a checkpoint to an engine that may serve."""
