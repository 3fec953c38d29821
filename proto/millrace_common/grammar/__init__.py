"""Grammars of outputs: what a client may ask for, in the words of llguidance."""
