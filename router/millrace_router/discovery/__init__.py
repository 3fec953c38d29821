"""Which workers exist: static list, DNS or Kubernetes, behind one interface (base.py).

A source says what is there; it never talks to a worker, and knows nothing of roles, links or requests.
"""
