"""Who runs next, and what the next step does. No torch."""
