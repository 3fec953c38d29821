"""Which workers serve a request. choose.py decides."""
