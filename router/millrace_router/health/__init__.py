"""Which workers are left out after failures, and how many retries are allowed."""
