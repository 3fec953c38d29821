"""Scheduling: the sequences of the next step, their pages and slots. No torch."""
