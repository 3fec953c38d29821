"""Versions of our interfaces. Two processes work together only with equal numbers."""

WORKER_API = 2  # worker.proto, prefill.proto and decode.proto: the services of a worker
MOST_REPLICAS = 1024  # of a worker: what it says of them makes lists in others
KV_PROTOCOL = 3  # kv.proto, and the bytes of a page: how one worker reads the pages of another
