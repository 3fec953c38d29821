"""How far a rank is, how long its step may take, and who hangs."""
