"""Protection of all requests from the failures of one worker."""
