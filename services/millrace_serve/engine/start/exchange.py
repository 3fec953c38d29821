"""The choice of the exchange: how rows reach the experts of other replicas."""

import functools
import logging
from dataclasses import dataclass

from millrace_kernels.peer.sizes import row_bytes
from torch import Tensor

from millrace_serve.engine.config import Role
from millrace_serve.engine.start.activations import MOST_PEERS
from millrace_serve.engine.start.startup import RankSetup
from millrace_serve.engine.step.graphs import buckets_up_to, graph_keys
from millrace_serve.model.experts.deepep import DeepEpExperts
from millrace_serve.model.experts.deepep_buffer import DeepEpBuffer, machines, refusal
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.experts.routed import Implementation
from millrace_serve.model.parallel import hosts, reaches_peers
from millrace_serve.model.quantised import FORMS

log = logging.getLogger(__name__)

# For the rows of all replicas; more rows go in several exchanges, each with fewer rows for an expert.
PEER_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    name: str
    experts: Implementation
    nbytes: int = 0  # of the device, which torch does not know of
    error: Tensor | None = None  # int32 [1] on the device: 0, or 1 + the replica that did not answer for minutes


def make_exchange(setup: RankSetup) -> ExpertExchange:
    """Collective. auto: peer memory on one host and DeepEP between hosts, where they can serve, else `gather`.

    Raises ValueError if the exchange that is asked for cannot serve these ranks.
    """
    made = _choose(setup)
    log.info("exchange=%s dp=%d: rows to the experts of other replicas", made.name, setup.dims.dp)
    return made


def _choose(setup: RankSetup) -> ExpertExchange:
    wanted, dims = setup.execution.exchange, setup.dims
    if dims.dp == 1:
        return ExpertExchange("local", LocalExperts)
    if wanted in ("auto", "peer"):
        why = _no_peers(setup)
        if not why:
            return _peer(setup)
        _refuse(wanted, "peer", why)
    if wanted == "deepep" or (wanted == "auto" and len({*hosts(dims)}) > 1):
        rows = _decode_rows(setup)
        why = refusal(setup.model, dims, machines(dims), rows, fp8=setup.kept.experts is FORMS["fp8"])
        if not why:
            return _deepep(setup, rows)
        _refuse(wanted, "deepep", why)
        log.warning("exchange=deepep would be faster but cannot run: %s", why)
    return ExpertExchange("gather", GatherExperts)


def _refuse(wanted: str, name: str, why: str) -> None:
    if wanted == name:
        raise ValueError(f"exchange={name} cannot run: {why}. exchange=gather runs everywhere")


def _no_peers(setup: RankSetup) -> str:
    """Why the ranks cannot share memory; empty: they can. The same on every rank."""
    dims, own = setup.dims, setup.device
    if own.type != "cuda":
        return f"the device is {own.type}, not cuda"
    if dims.dp > MOST_PEERS:
        return f"dp={dims.dp} is more than {MOST_PEERS}"
    if len({*hosts(dims)}) > 1:
        return "the ranks are on several hosts"
    reached = dims.exchange(b"1" if reaches_peers(own) else b"")
    return "" if all(reached) else "devices do not reach each other's memory"


def _peer(setup: RankSetup) -> ExpertExchange:
    from millrace_kernels.peer.exchange import Exchange as Peers  # needs Triton

    from millrace_serve.model.experts.peer import PeerExperts

    dims, model = setup.dims, setup.model
    assert dims.dp_group is not None
    rows, choices = _peer_room(setup)[0], model.num_experts_per_tok + 1
    peers = Peers(dims.dp_group, setup.device, rows, model.hidden_size, choices, setup.dtype)
    return ExpertExchange("peer", functools.partial(PeerExperts, peers), peers.nbytes, peers.error)


def _peer_room(setup: RankSetup) -> tuple[int, int]:
    """Rows of each replica in one exchange, and bytes of the rows of all."""
    of_row = row_bytes(setup.model.hidden_size, setup.model.num_experts_per_tok + 1, setup.dtype)
    rows = min(setup.most_rows, PEER_BYTES // setup.dims.dp // of_row)
    return rows, setup.dims.dp * rows * of_row


def expected_bytes(setup: RankSetup) -> int:
    """Of the exchange that `auto` takes on one host; 0 where that is unknown: DeepEP's library says its own."""
    dims, wanted = setup.dims, setup.execution.exchange
    peers = wanted in ("auto", "peer") and 1 < dims.dp <= MOST_PEERS
    return _peer_room(setup)[1] if peers else 0


def _deepep(setup: RankSetup, rows: int) -> ExpertExchange:
    dims, model = setup.dims, setup.model
    slots = model.n_routed_experts // dims.world + dims.redundant_experts
    buffer = DeepEpBuffer(model, dims, slots, rows, setup.device)
    return ExpertExchange("deepep", functools.partial(DeepEpExperts, buffer), buffer.nbytes, buffer.error)


def _decode_rows(setup: RankSetup) -> int:
    """The most rows of a decode step, padding included; 0 on a prefill worker."""
    if setup.role is Role.PREFILL:
        return 0
    buckets = setup.buckets or buckets_up_to(setup.limits.max_running)
    return max(key.bucket * key.num_queries for key in graph_keys(buckets, setup.limits.num_queries))
