"""The interface of discovery: a source reports the full set of targets again and again, and the listener compares."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Target:
    """An address that should be a worker. A worker on several hosts is represented by its leader."""

    key: str  # unique, and constant for its whole life: a pod's UID, or the address
    address: str  # host:port of its gRPC server
    name: str = ""  # for operators, such as the pod's
    role: str = ""  # "prefill", "decode", "unified" or unknown; valid until the worker reports its role
    revision: str = ""  # workers of two revisions never pair, and `routing.revision` names the one that is asked first
    withheld: str = ""  # why the worker should get no new requests; empty: it may get them
    topology: Mapping[str, str] = field(default_factory=dict)  # "host", "zone" and whatever is configured

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.name else self.address


class Listener(Protocol):
    """Called on the event loop."""

    def on_targets(self, targets: Sequence[Target]) -> None:
        """`targets` is everything that exists now, one target per address."""

    def on_trouble(self, kind: str) -> None:
        """A look failed. The last report stays valid: an outage removes no worker. `kind` is one of TROUBLES."""


# Resource version too old; no answer; an error answer, such as 401 and 403; a certificate or TLS itself; any other.
TROUBLES = ("gone", "silent", "refused", "untrusted", "failed")


class Source(Protocol):
    def start(self, listener: Listener) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes between two sets of targets, by key. A target with a new address was removed and added."""

    removed: tuple[Target, ...]
    added: tuple[Target, ...]
    updated: tuple[Target, ...]  # as they are now


def diff(known: Mapping[str, Target], targets: Iterable[Target]) -> Changes:
    """`known` is by key."""
    now = {target.key: target for target in targets}
    stay = {key for key in known.keys() & now.keys() if known[key].address == now[key].address}
    return Changes(
        removed=tuple(target for key, target in known.items() if key not in stay),
        added=tuple(target for key, target in now.items() if key not in stay),
        updated=tuple(target for key, target in now.items() if key in stay and target != known[key]),
    )


def one_per_address(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Keep one target per address. `targets` are in order of age, oldest first. Of those with one address, which
    happens while a pod is replaced, the youngest that may get requests is kept, else the youngest.
    """
    chosen: dict[str, Target] = {}
    for target in targets:
        other = chosen.get(target.address)
        if other is None or not target.withheld or other.withheld:
            chosen[target.address] = target
    return tuple(chosen.values())


def join(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
