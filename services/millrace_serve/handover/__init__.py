"""The two ends of one protocol: a prompt's pages go from one worker to another."""
