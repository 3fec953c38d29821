"""Which workers stand still, which are left out after failures, and how many retries are allowed."""
