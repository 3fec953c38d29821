"""Which workers exist: static list, DNS or Kubernetes, behind one interface (base.py)."""
