"""Reasons why a request fails. millrace_rpc/errors.py has their meaning for clients and routers."""

import enum


class Reason(enum.StrEnum):
    INVALID_ARGUMENT = "INVALID_ARGUMENT"  # the request can never work as it is
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"  # prompt (+ max_tokens) over the model's context
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    UNSUPPORTED_ENCODING = "UNSUPPORTED_ENCODING"  # of a body over HTTP
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    NOT_FOUND = "NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"  # of a path over HTTP
    QUEUE_FULL = "QUEUE_FULL"  # the router's queue
    RATE_LIMITED = "RATE_LIMITED"  # the API key's own limit
    OVERLOADED = "OVERLOADED"  # a worker without capacity
    SLOW_CLIENT = "SLOW_CLIENT"  # the client did not read its stream
    NO_WORKERS = "NO_WORKERS"  # no routable pair
    NOT_READY = "NOT_READY"
    DRAINING = "DRAINING"
    DEADLINE_TOO_SHORT = "DEADLINE_TOO_SHORT"  # the deadline would pass in the router's queue
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    EPOCH_CHANGED = "EPOCH_CHANGED"  # another process answers at this address
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    KV_NOT_FOUND = "KV_NOT_FOUND"
    KV_EXPIRED = "KV_EXPIRED"
    KV_MISMATCH = "KV_MISMATCH"  # pages of other tokens than the prompt's, or bytes changed on the way
    NOT_FINITE = "NOT_FINITE"  # the model's logits have a NaN or an infinite number
    TRANSFER_FAILED = "TRANSFER_FAILED"  # a read of pages, or one stream between workers, broke
    WORKER_LOST = "WORKER_LOST"  # the process or its connection went away
    STALLED = "STALLED"  # a stage made no progress within its limit
    INTERNAL = "INTERNAL"
