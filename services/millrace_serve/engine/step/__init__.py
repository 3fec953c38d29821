"""One step: arrays of a plan, the model's run, sampled tokens."""
