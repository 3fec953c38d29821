"""A rank process: one engine (or a follower of one), and a thread that reads KV of other workers. No gRPC here.

Life of a rank:

1. connect to the frontend, report LOADING
2. join the other ranks, load the model, make the KV pool, report COMPILING, compile and capture
   (engine/start/startup.py)
3. open the transport: describe the pool for others, and start the reader
4. report RankReady with the endpoints of the inboxes
5. the engine loop (loop.py), until Stop; a thread reports the progress of the process meanwhile (heartbeat.py)
6. the transfer ends before the pool goes away, and the rank leaves the others
An error on the way is reported as RankFailed, and the process exits with code 1.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

import zmq
from millrace_common import deployment_secret
from millrace_common import log as logs
from millrace_common.process_start import no_core_dumps

from millrace_serve.engine.health.heartbeat import HeartbeatThread
from millrace_serve.engine.start.memory import check_pages, host_memory
from millrace_serve.engine.start.phases import Phases
from millrace_serve.transfer.base import KvSink, PageBuffer, TransferError
from millrace_serve.transfer.checked import CheckedSink
from millrace_serve.transfer.messages import FromReader, ToReader
from millrace_serve.transfer.nixl import NixlSink, NixlSource
from millrace_serve.transfer.reader import Reader
from millrace_serve.worker.channels import Context, Receiver, Sender, channel_key
from millrace_serve.worker.config import EngineKind
from millrace_serve.worker.messages import Dropped, FromRank, RankFailed, RankProgress, RankReady, Report, ToEngine
from millrace_serve.worker.rank.loop import EngineLoop, Upkeep, follower_inbox
from millrace_serve.worker.rank.parts import Parts, RankSpec
from millrace_serve.worker.rank.weights import set_weights

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
COMPILING_PHASES = ("compile", "capture")  # the worker is LOADING in the others


class StartRefused(Exception):
    """The settings ask for what the checkpoint, the ranks or the device cannot give, or the checkpoint is unusable."""


def main(spec: RankSpec) -> None:
    """Entry point of a spawned rank process; ends with its parent."""
    die_with_parent()
    sys.exit(run(spec))


def run(spec: RankSpec) -> int:
    """The rank's whole life; the exit code."""
    no_core_dumps()  # an actor of Ray inherits no limit of ours
    logs.setup(f"{spec.config.role}/rank{spec.rank}", spec.config.log_level)
    try:
        key = channel_key(spec.config.secret, spec.group)
    except OSError as error:  # and without it nobody can be told
        log.error("%s", error)
        return 1
    return live(spec, key)


def live(spec: RankSpec, key: bytes) -> int:
    """What of a rank's life is not of a process of its own; the exit code."""
    context = zmq.Context()
    outbox: Sender[FromRank] = Sender(context, spec.frontend, key)
    try:
        _serve(spec, context, key, lambda report: outbox.send(FromRank(spec.rank, report)))
        return 0
    except StartRefused as error:
        log.debug("rank %d failed", spec.rank, exc_info=True)
        outbox.send(FromRank(spec.rank, RankFailed(str(error), refused=True)))
        return 1
    except Exception as error:
        log.exception("rank %d failed", spec.rank)
        outbox.send(FromRank(spec.rank, RankFailed(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        context.destroy(linger=500)


def _serve(spec: RankSpec, context: Context, key: bytes, report: Callable[[Report], None]) -> None:
    config = spec.config
    report(RankProgress("loading", f"rank {spec.rank}: {config.model_name}"))

    def on_phase(name: str) -> None:
        report(RankProgress("compiling" if name in COMPILING_PHASES else "loading", f"rank {spec.rank}: {name}"))

    phases = Phases(on_phase)
    try:
        parts = _build(spec, phases)
    except ValueError as error:
        if any(name in phases.seconds for name in COMPILING_PHASES):
            raise  # a fault of ours: what the settings ask for was checked before
        raise StartRefused(error) from error
    report(RankProgress("compiling", f"rank {spec.rank}"))
    secret = deployment_secret.read(config.secret)  # once: it may not be there when other weights come
    _open_store(parts, secret)
    inbox: Receiver[ToEngine] = Receiver(
        context, spec.bind.format(name="engine"), ToEngine, key, lambda: report(Dropped())
    )
    pool, on_gpu = parts.pool, config.device == "cuda"
    where = ("VRAM", pool.buffer.device.index) if on_gpu else ("DRAM", 0)
    buffer = PageBuffer(pool.address, pool.layout.page_bytes, pool.num_pages, *where)
    source = NixlSource(buffer)
    sink = NixlSink(buffer) if parts.check is None else CheckedSink(NixlSink(buffer), parts.check)
    endpoint, reader = _reader_thread(spec, context, key, sink)
    report(
        RankReady(
            engine_endpoint=inbox.endpoint,
            reader_endpoint=endpoint,
            vocab_size=parts.vocab_size,
            max_context=_context(parts, spec.rank),
            eos_token_ids=parts.eos_token_ids,
            layout=parts.pool.layout,
            num_pages=parts.pool.num_pages,
            startup=phases.seconds,
            memory=source.handle(),
        )
    )
    heartbeats: Sender[FromRank] = Sender(context, spec.frontend, key)
    with HeartbeatThread(parts.progress, lambda heartbeat: heartbeats.send(FromRank(spec.rank, heartbeat))):
        to_set = partial(set_weights, parts, lambda: _open_store(parts, secret, starts=False))
        _step(parts, inbox, report, Upkeep(spec.rank, report, parts.progress.busy, to_set))
    reader.join()
    source.close()
    if parts.leave:
        parts.leave()


def _step(parts: Parts, inbox: Receiver[ToEngine], report: Callable[[Report], None], upkeep: Upkeep) -> None:
    """Until Stop."""
    if parts.engine is not None:
        EngineLoop(parts.engine, inbox, report, upkeep).run()
    else:
        assert parts.run is not None
        # once started, only this thread uses the inbox and the outbox
        listen = partial(_reporting, "the inbox", partial(follower_inbox, inbox, upkeep), report)
        threading.Thread(target=listen, name="inbox", daemon=True).start()
        parts.run()


def _reporting(what: str, run: Callable[[], None], report: Callable[[RankFailed], None]) -> None:
    """Of a thread without which nothing that is asked of this rank would ever be answered."""
    try:
        run()
    except Exception as error:
        log.exception("%s failed", what)
        report(RankFailed(f"{what} failed: {type(error).__name__}: {error}"))


def _build(spec: RankSpec, phases: Phases) -> Parts:
    """Torch is imported for a real model only."""
    config = spec.config
    if config.engine is EngineKind.MODEL:
        with phases("import"):
            from millrace_serve.worker.rank.model import build

        return build(spec, phases)
    from millrace_serve.engine.sim.factory import build_sim_engine, sim_layout

    assert config.limits.num_pages != "auto"
    limits = config.limits.resolved(config.limits.num_pages)
    check_pages(limits.num_pages, sim_layout(limits, config.sim).page_bytes, host_memory())
    limits.check_host_memory(1, [""], "", host_memory())
    engine = build_sim_engine(limits, config.role, config.sim)
    facts = config.sim.vocab_size, config.limits.max_model_len, [config.sim.eos_token_id]
    return Parts(engine.pool, engine.progress, *facts, engine)


def _context(parts: Parts, rank: int) -> int:
    """Tokens of the longest sequence: the pool may have room for fewer than the limits allow."""
    room = (parts.pool.num_pages - 1) * parts.pool.layout.page_size + 1  # the last token is never fed back
    if room < parts.max_context and not rank:
        log.warning("num_pages limits requests to %d of %d tokens; raise it for more", room, parts.max_context)
    return min(room, parts.max_context)


def _open_store(parts: Parts, secret: bytes, *, starts: bool = True) -> None:
    """Raises StartRefused when at a start the folder cannot be used: later it keeps nobody from work."""
    try:
        if parts.engine is not None:
            parts.engine.open_store(secret, patient=starts)
    except (OSError, TransferError) as error:
        raise StartRefused(error) from error


def _reader_thread(spec: RankSpec, context: Context, key: bytes, sink: KvSink) -> tuple[str, threading.Thread]:
    """The endpoint of the reader's inbox, and the thread that reads KV until StopReader."""
    outbox: Sender[FromRank] = Sender(context, spec.frontend, key)  # from now on used by the new thread only
    stall_s = spec.config.timeouts.stall

    def report(message: FromReader | RankFailed | Dropped) -> None:
        outbox.send(FromRank(spec.rank, message))

    inbox: Receiver[ToReader] = Receiver(
        context, spec.bind.format(name="transfer"), ToReader, key, lambda: report(Dropped())
    )
    reader = Reader(sink, inbox, report, stall_s)

    def run() -> None:
        try:
            _reporting("the KV reader", reader.run, report)  # if it fails, the pages must stay allocated
        finally:
            inbox.close()
            outbox.close()

    thread = threading.Thread(target=run, name="kv-reader", daemon=True)
    thread.start()
    return inbox.endpoint, thread


def die_with_parent() -> None:
    """Leave the terminal's signals to the frontend, and exit with it, even inside native code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
