"""Discovery of workers: static list or Kubernetes, behind one interface (base.py)."""
