"""A request's way through the router: queue, attempts, stream."""
