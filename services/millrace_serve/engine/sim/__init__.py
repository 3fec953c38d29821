"""An engine without a model and without torch."""
