"""The source that the configuration asks for."""

from collections.abc import Iterable

from millrace_common.config import ConfigError

from millrace_router.config import DiscoveryConfig, StaticTarget
from millrace_router.discovery.base import Listener, Source, Target, one_per_address


class StaticSource:
    """A list that does not change."""

    def __init__(self, targets: Iterable[StaticTarget]) -> None:
        self._targets = one_per_address(
            Target(t.address, t.address, revision=t.revision, topology=t.topology) for t in targets
        )

    def start(self, listener: Listener) -> None:
        listener.on_targets(self._targets)

    async def stop(self) -> None:
        pass


def make_source(config: DiscoveryConfig, static: Iterable[StaticTarget]) -> Source:
    """Raises ConfigError when something for it is not installed, or its credentials cannot be used."""
    if config.kind == "static":
        return StaticSource(static)
    try:
        from millrace_router.discovery import kube_api
        from millrace_router.discovery.kubernetes import KubernetesSource
    except ModuleNotFoundError as error:  # its client is an extra: nothing else needs it
        raise ConfigError(f"discovery.kind=kubernetes needs millrace[kubernetes]: {error}") from error
    kube_api.check(config.kubernetes)
    return KubernetesSource(config.kubernetes)
