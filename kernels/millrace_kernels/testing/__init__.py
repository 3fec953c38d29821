"""Inputs and tolerances of ops, for their tests and their benches; nothing that serves imports them."""
