"""`millrace compile`: start the ranks as a worker does, without serving, so that all is compiled."""

import logging
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from millrace_common import config as configuration
from millrace_common import log as logs
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Events
from millrace_serve.engine.start import phases
from millrace_serve.worker import caches
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.ranks import Handler, Ranks
from millrace_serve.worker.launch import make_launcher
from millrace_serve.worker.messages import GcPauses, RankProgress
from rich.console import Console
from rich.table import Table

from millrace_cli.errors import CommandError, told

STOP_GRACE_S = 10.0
MIB = 1 << 20
log = logging.getLogger(__name__)


async def fill(
    path: Path | None, overrides: Sequence[str], environ: MutableMapping[str, str], *, random_weights: bool = False
) -> None:
    """Raises CommandError when the ranks cannot start. `environ`: the process's own, which the ranks inherit."""
    config = settings(path, overrides, random_weights=random_weights)
    logs.setup("compile", config.log_level)
    environ.update(caches.variables(config.cache_dir))
    before = caches.sizes(config.cache_dir)
    handlers: dict[type, Handler] = dict.fromkeys((Events, GcPauses), lambda rank, report: None)
    handlers[RankProgress] = lambda rank, progress: log.info("%s", progress.message)
    ranks = Ranks(config, make_launcher(config.launcher), handlers, lambda why: None)
    try:
        await ranks.start()
        seconds = ranks.startup()
    except MillraceError as error:
        raise CommandError(f"could not start: {error.message}") from error
    finally:
        await ranks.stop(STOP_GRACE_S)
    print(f"{config.num_ranks} rank(s) of {config.model_name}: {phases.table(seconds)}")
    Console(highlight=False).print(_table(config.cache_dir, before))


def settings(path: Path | None, overrides: Sequence[str], *, random_weights: bool) -> WorkerConfig:
    """Those of a unified worker, which compiles for every role. What is auto follows from role and weights of the
    worker that comes. Raises CommandError.
    """
    with told(configuration.ConfigError):
        config = configuration.load(WorkerConfig, path, [*(() if path else ("role=unified",)), *overrides])
    role = config.role if any(item.startswith("role=") for item in overrides) else Role.UNIFIED
    return config.model_copy(update={"role": role, "random_weights": random_weights or config.random_weights})


def _table(cache_dir: Path, before: dict[str, tuple[int, int]]) -> Table:
    table = Table(str(cache_dir.expanduser()), "files", "MiB", "new files", box=None, pad_edge=False)
    for name, (files, size) in caches.sizes(cache_dir).items():
        table.add_row(name, str(files), f"{size / MIB:.1f}", str(files - before[name][0]))
    return table
