"""Discovery of workers: static list, DNS or Kubernetes, behind one interface (base.py)."""
