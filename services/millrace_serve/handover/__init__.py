"""Both ends of the hand-over: a prompt's pages go from one worker to another."""
