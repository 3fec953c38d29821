"""Text and token ids, and the structure of a model's output."""
