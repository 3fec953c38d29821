"""The state around the pure choice: the indexes, the turns of equal scores, and the recorded decisions."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from millrace_common.metrics import Metrics
from millrace_common.page_hash import page_hashes

from millrace_router.config import Policy, RouterConfig, Routing
from millrace_router.policy.choose import NO_PAGES, Chooser, Decision, Situation
from millrace_router.policy.holders import Process
from millrace_router.policy.kv_index import KvIndex
from millrace_router.policy.prefix_index import PrefixIndex
from millrace_router.policy.snapshot import Key, Placement, PlacementRequest, View

REMEMBERED = 1024  # decisions: seconds to minutes of a router


Pages = Mapping[Process, float]


class Indexes:
    """The indexes that the configured policies need. With limits, decode workers may run prompts: that wants an
    estimate, from the decode policy's index, else from whichever there is.
    """

    def __init__(self, prefill: Policy, decode: Policy, routing: Routing) -> None:
        policies, local = {prefill, decode}, routing.slo.slo.limited
        self.kv = KvIndex() if Policy.KV_AWARE in policies else None
        guess = Policy.PREFIX_AWARE in policies or (local and self.kv is None)
        self.prefix = PrefixIndex(routing.prefix_blocks) if guess else None
        by_policy = {Policy.KV_AWARE: self.kv, Policy.PREFIX_AWARE: self.prefix}
        estimate = self.prefix if self.kv is None else self.kv
        self._of_prefill = by_policy.get(prefill)
        self._of_decode = by_policy.get(decode, estimate if local else None)
        self._latest: tuple[Sequence[int], int, bytes, tuple[bytes, ...]] = ((), 0, b"", ())

    def blocks(self, token_ids: Sequence[int], page_size: int, salt: bytes) -> tuple[bytes, ...]:
        """Return the blocks of the full pages of a prompt; empty without an index. The continuations of a request share
        its ids, so the latest answer is kept.
        """
        if (self.prefix is None and self.kv is None) or page_size < 1:
            return ()
        known, size, its_salt, blocks = self._latest
        if known is not token_ids or (size, its_salt) != (page_size, salt):
            blocks = tuple(page_hashes(token_ids, page_size, salt=salt)[: len(token_ids) // page_size])
            self._latest = token_ids, page_size, salt, blocks
        return blocks

    def lookup(self, want: PlacementRequest) -> tuple[Pages, Pages, Mapping[Process, int]]:
        """Leading pages that are cached: for the prefill policy, for the decode policy, and on devices, to be
        served.
        """
        blocks = want.pages
        if not blocks:
            return NO_PAGES, NO_PAGES, NO_PAGES
        on_device = NO_PAGES if self.kv is None else self.kv.lookup(blocks)
        found: dict[KvIndex | PrefixIndex | None, Pages] = {None: NO_PAGES}
        if self.kv is not None:
            found[self.kv] = self.kv.weighted(blocks, on_device)
        if self.prefix is not None:
            found[self.prefix] = self.prefix.lookup(blocks)
        return found[self._of_prefill], found[self._of_decode], on_device

    def note(self, want: PlacementRequest, placement: Placement) -> None:
        if self.prefix is None or not want.pages:
            return
        replicas = (placement.prefill, placement.decode)
        self.prefix.note(want.pages, [replica.process for replica in replicas if replica is not None])

    def keep(self, holders: Iterable[Process]) -> None:
        if self.prefix is not None:
            self.prefix.keep(set(holders))


class Placer:
    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self.indexes = Indexes(config.prefill_policy, config.decode_policy, config.routing)
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self._chooser = Chooser(config.prefill_policy, config.decode_policy, config.routing)
        self._metrics = metrics
        self._last: dict[str, Key] = {}

    def choose(self, view: View, want: PlacementRequest) -> Decision | None:
        """A decision is carried out by the caller: its requests count as sent."""
        decision = self._chooser.choose(Situation(view, want, dict(self._last), *self.indexes.lookup(want)))
        if decision is None:
            return None
        prefill, decode = decision.placement.prefill, decision.placement.decode
        if prefill is not None:
            self._last["prefill"] = prefill.key
        if decode is not None:
            self._last["whole" if prefill is None else "decode"] = decode.key
        self.indexes.note(want, decision.placement)
        self.decisions.append(decision)
        self._metrics.placements.labels(
            route=decision.route, prefill_policy=self._chooser.prefill, decode_policy=self._chooser.decode
        ).inc()
        self._metrics.expected_cached_tokens.inc(decision.cached_tokens)
        return decision

    def decisions_of(self, request_id: str) -> list[Decision]:
        """The decisions of all continuations and attempts of a request, oldest first."""
        return [decision for decision in self.decisions if decision.situation.want.request_id == request_id]
