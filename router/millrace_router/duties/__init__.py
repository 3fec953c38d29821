"""Which duty each flexible worker has: it follows the load."""
