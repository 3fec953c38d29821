"""The choice of the workers for a request; choose.py decides."""
