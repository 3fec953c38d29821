"""Reading, writing and naming checkpoints, and stand-ins for them: random weights, and shapes alone."""
