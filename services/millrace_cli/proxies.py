"""Proxies that the environment names. Nothing of ours is behind one: neither a loopback address nor another worker."""

import os
from collections.abc import MutableMapping

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
LOOPBACK = "localhost,127.0.0.1,::1"


def spare_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Exempt loopback addresses from the proxies, for every library of this process and of its children."""
    if _named(environment):
        spared = environment.get("no_proxy") or environment.get("NO_PROXY")
        for name in ("no_proxy", "NO_PROXY"):
            environment[name] = ",".join(filter(None, (spared, LOOPBACK)))


def hint(environment: MutableMapping[str, str] = os.environ) -> str:
    """The end of a message about an address that nobody answers at; empty: no proxy is set."""
    named = _named(environment)
    return f" ({named} is set; if the address needs no proxy, add its host to no_proxy)" if named else ""


def _named(environment: MutableMapping[str, str]) -> str:
    names = (form for name in VARIABLES for form in (name, name.upper()))
    return next((name for name in names if environment.get(name)), "")
