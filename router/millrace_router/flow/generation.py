"""Execution of the decisions of a pure flow (flow.py): one `Generation` per continuation.

Events come from the queue (`_serve`), the Links (`_LinkedSubRequest`), the clock (`_tick`) and the client (`stop`,
`cancel`); the flow's actions go out in `perform`. Whatever happened, `_settle` moves the timer and wakes the client's
stream.
"""

import asyncio
import logging
import math
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.v1 import common_pb2, inference_pb2, prefill_pb2, worker_pb2
from millrace_common.log import PER_REQUEST
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_common.spans import Tracer
from millrace_rpc.errors import MillraceError

from millrace_router.config import RouterConfig
from millrace_router.duties.demand import RecentDemand
from millrace_router.fleet.link import Link, Source
from millrace_router.fleet.registry import Registry
from millrace_router.fleet.worker import Worker
from millrace_router.flow.flow import AbortSubRequest, Action, Blame, Flow, Mismatch, Retry, Stage, Stale, SubRequest
from millrace_router.flow.spans import ContinuationSpans
from millrace_router.policy.choose import Decision
from millrace_router.policy.snapshot import PlacementRequest, PrefixFetch, Replica
from millrace_router.queue.admission import Admission
from millrace_router.queue.fair_queue import Place, Ticket
from millrace_router.queue.tenant import Tenant

log = logging.getLogger(__name__)

NO_WORKER = "none"  # of the role: a label's value
LONGEST_MS = 2**32 - 1  # that a message can say: seven weeks


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts that every generation shares."""

    config: RouterConfig
    registry: Registry
    admission: Admission
    metrics: Metrics
    tracer: Tracer
    demand: RecentDemand


@dataclass(slots=True)
class AnswerWeights:
    """The weights that an answer began with: every further token is of the same. Empty: none yet."""

    weights: str = ""
    version: str = ""  # of `weights`


@dataclass(frozen=True, slots=True)
class Job:
    """A validated continuation. `sampling` has seed and max_tokens set."""

    token_ids: "array[int]"  # u32
    sampling: common_pb2.SamplingParams
    place: Place  # over all of its attempts
    request_id: str
    received: float  # on the event loop's clock
    deadline: float | None
    tenant: Tenant
    answer: AnswerWeights  # of the request
    session_id: str = ""
    keep_s: int = 0
    least_outputs: int = 0  # tokens that the answer gets in any case


class Generation:
    def __init__(self, backend: Backend, job: Job, spans: ContinuationSpans, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        config, now = backend.config, self._loop.time()
        self.job = job
        self.wake = wake
        self.stage = Stage.QUEUED  # as `_settle` saw it last
        self._tokens = len(job.token_ids) + job.sampling.max_tokens  # at the end, at most
        self._prompt = job.token_ids  # of the latest attempt: with the outputs so far
        self.room = secrets.randbits(64) or 1
        self.cached_tokens = 0
        self.usage = inference_pb2.Usage()  # what attempts reported with the first token and at their ends
        self.tokens_at: float | None = None  # when the first token arrived
        self.flow = Flow(
            timeouts=config.timeouts,
            max_tokens=job.sampling.max_tokens,
            max_attempts=config.max_attempts,
            deadline=job.deadline,
            progress=now,
            queue_s=config.timeouts.queue if backend.registry.will_be_ready else config.timeouts.no_workers,
            wants_logprobs=job.sampling.HasField("logprobs"),
        )
        self._backend = backend
        self.slo = job.tenant.limits(config.routing.slo.slo)
        self._health = backend.registry.health
        self._cache_salt = backend.registry.cache_salt(job.tenant.cache_group)
        self._spans = spans
        self._ticket: Ticket | None = None
        self._placed: dict[SubRequest, Replica] = {}
        self._workers: dict[SubRequest, Worker] = {}  # also those that discovery has dropped since
        self._links: dict[SubRequest, Link] = {}
        self._avoid: frozenset[str] = frozenset()  # addresses of workers that failed it before
        self._weights = ""  # of the model that was asked last
        self.version = ""  # of these weights
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop gives a handle without a time for a moment that has passed
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._health.budget.begin()
        self.job.tenant.running.add(1, self._tokens)
        job = self.job
        self._backend.demand.arrived(len(job.token_ids), job.sampling.max_tokens, self.slo, job.least_outputs)
        self._arm()
        self._safely(self._enter)

    def stop(self) -> None:
        self.perform(self.flow.stop())

    def cancel(self, error: MillraceError) -> None:
        self.perform(self.flow.cancel(error))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case AbortSubRequest(sub, attempt, reason):
                    if sub in self._links:  # else the Link of its source was gone, and it was not submitted
                        self._links[sub].abort(self.room, attempt, reason)
                case Blame(subs, reason):
                    blamed = [replica for sub, replica in self._placed.items() if sub in subs]
                    self._avoid |= {replica.address for replica in blamed}
                    self._health.failed([replica.epoch for replica in blamed], reason)
                case Retry():
                    self._retry(action)
                case Stale(kind):
                    self._backend.metrics.stale.labels(kind=kind).inc()
                case Mismatch():
                    self._backend.metrics.mismatches.inc()
        self._settle()

    def _safely(self, step: Callable[[], None]) -> None:
        """A fault of ours ends the request: nothing else would, and the loop tells nobody of an exception."""
        try:
            step()
        except Exception as error:
            self.cancel(MillraceError.of(error, log, "a request cannot go on"))

    def _enter(self) -> None:
        self._again = None
        self._spans.waits(self._loop.time())
        late_at = self.job.received + self.slo.ttft_s / 2  # the rest is for workers
        self._ticket = Ticket(self.job.place, self._want(), self._serve, self._refuse, self.flow.attempt >= 0, late_at)
        self._backend.admission.enter(self._ticket)

    def _refuse(self, error: MillraceError) -> None:
        """Another ticket took the place in the queue, or no worker will ever serve this one."""
        self._ticket = None
        self.cancel(error)

    def _want(self) -> PlacementRequest:
        job, flow, registry = self.job, self.flow, self._backend.registry
        self._prompt = job.token_ids + array("I", flow.outputs) if flow.outputs else job.token_ids
        page_size = max(registry.model.layout.page_size, 1)
        return PlacementRequest(
            tokens=len(self._prompt),
            outputs=flow.remaining,
            slo=self.slo,
            least=max(job.least_outputs - len(flow.outputs), 0),
            avoid=self._avoid,
            weights=job.answer.weights,
            version=job.answer.version,
            session=job.session_id,
            pages=registry.placer.indexes.blocks(self._prompt, page_size, self._cache_salt),
            page_size=page_size,
            draw=(self.room + flow.attempt) % 2**64,
            request_id=job.request_id,
            attempt=flow.attempt + 1,
        )

    def _serve(self, decision: Decision) -> None:
        self._ticket = None
        self._spans.placed(self._loop.time(), self.flow.attempt + 1, decision)
        self._backend.demand.placed(decision.cached_tokens)
        subs = {SubRequest.PREFILL: decision.placement.prefill, SubRequest.DECODE: decision.placement.decode}
        self._placed = {sub: replica for sub, replica in subs.items() if replica is not None}
        self._links = {}  # one of the attempt before may be the Link of this one
        self.flow.assign(frozenset(self._placed), self._loop.time())
        self._submit(decision)
        self._settle()

    def _retry(self, retry: Retry) -> None:
        facts = self.flow.attempt, len(self.flow.outputs), self.flow.error
        log.info("attempt %d failed after %d tokens: %s", *facts, extra=PER_REQUEST)
        self._spans.over(self._loop.time(), error=str(self.flow.error))
        if not retry.refused and not self._health.budget.spend(self._loop.time()):
            self._backend.metrics.retries_refused.inc()
            self.flow.give_up()
            return
        self._backend.metrics.retries.labels(reason=str(retry.reason)).inc()
        self._again = self._loop.call_later(retry.delay_s, self._safely, self._enter)

    def _submit(self, decision: Decision) -> None:
        """Send the attempt to its sub-requests. A Link that is gone fails its sub-request at once, which ends the
        attempt half-way.
        """
        length, prompt = len(self._prompt), self._prompt.tobytes()
        # the prefill sub-request comes first and is the decode sub-request's source
        source: Source = self._prefix(decision.prefix_fetch)
        for sub, replica in self._placed.items():
            if sub not in self.flow.open:
                return
            self._workers[sub] = worker = self._backend.registry.workers[replica.address]
            self._weights, self.version = worker.weights, worker.info.weights_version
            request = self._request(replica.index)
            computes = sub is SubRequest.PREFILL or source is None
            left_s = self.job.received + self.slo.ttft_s - self._loop.time()
            if computes and not self.flow.outputs and 0 < left_s < math.inf:  # a late one has its turn by the queue
                request.ttft_limit_ms = max(round(left_s * 1000), 1)
            if sub is SubRequest.DECODE and self.slo.tpot_s < math.inf:
                request.tpot_limit_ms = max(round(self.slo.tpot_s * 1000), 1)
            if not (packed := worker.info.packed_prompts):  # a worker of an earlier version
                request.token_ids.extend(self._prompt)
            outputs = 0 if sub is SubRequest.PREFILL else min(self.flow.remaining, replica.expected_output)
            worker.note_sent(
                replica.index, *((length - decision.cached_tokens, 0) if computes else (0, length)), outputs
            )
            assert worker.link is not None, "the policy chose a worker that is not linked"
            self._links[sub] = link = worker.link
            own = _LinkedSubRequest(self, sub, link, replica.index)
            link.submit(request, source, own, prompt if packed else b"")
            source = worker.source()

    def _prefix(self, found: PrefixFetch | None) -> prefill_pb2.KvPrefixRef | None:
        """Where the prefill worker gets leading pages of the prompt."""
        if found is None:
            return None
        source = self._backend.registry.workers[found.source.address].source()
        return prefill_pb2.KvPrefixRef(worker=source, replica=found.source.index, num_pages=found.num_pages)

    def _request(self, replica: int) -> worker_pb2.EngineRequest:
        """All but the token ids."""
        job, flow = self.job, self.flow
        left_ms = 0.0 if job.deadline is None else max((job.deadline - self._loop.time()) * 1000, 1.0)
        return worker_pb2.EngineRequest(
            id=common_pb2.AttemptId(room=self.room, attempt=flow.attempt),
            num_prior_outputs=len(flow.outputs),
            sampling=job.sampling,
            priority=job.place.priority,
            timeout_ms=int(min(left_ms, LONGEST_MS)),
            replica=replica,
            request_id=job.request_id,
            traceparent=self._spans.traceparent,
            cache_salt=self._cache_salt,
            keep_s=job.keep_s,
        )

    def begins(self) -> bool:
        """The first token has come. False: another continuation of the request has begun with other weights."""
        answer = self.job.answer
        if not answer.weights:
            answer.weights, answer.version = self._weights, self.version
        return answer.weights == self._weights

    def heard(self, sub: SubRequest) -> None:
        self._health.spoke(self._placed[sub].epoch)

    def attempt_ended(self, out: worker_pb2.SequenceOutput) -> None:
        """`out`: its last output."""
        if not out.drafted_tokens:
            return
        metrics, placed = self._backend.metrics, self._placed
        pair = [placed[sub].address if sub in placed else NO_WORKER for sub in (SubRequest.PREFILL, SubRequest.DECODE)]
        metrics.drafted_tokens.labels(*pair).inc(out.drafted_tokens)
        metrics.accepted_draft_tokens.labels(*pair).inc(out.accepted_draft_tokens)
        before, self.usage = self.usage, inference_pb2.Usage()  # deltas share the one before
        self.usage.MergeFrom(before)
        self.usage.drafted_tokens += out.drafted_tokens
        self.usage.accepted_draft_tokens += out.accepted_draft_tokens

    def _settle(self) -> None:
        stage = self.flow.stage
        if stage is not self.stage:
            self.stage = stage
            for sub, link in self._links.items():  # of a handover that is over
                if sub not in self.flow.open and stage is not Stage.HANDOVER:
                    link.forget(self.room)
            if self.flow.ended:
                self._finish()
            else:
                self._arm()
        self.wake()

    def _arm(self) -> None:
        """Have the timer fire no later than the flow expires; earlier is harmless."""
        expires = self.flow.expires
        if self._timer is None or self._timer_at > expires:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = expires
            self._timer = self._loop.call_at(expires, self._safely, self._tick)

    def _tick(self) -> None:
        self._timer, now = None, self._loop.time()
        self.flow.progress, registry = self._due_since(now), self._backend.registry
        if registry.will_be_ready:  # workers came while it waited for any
            self.flow.queue_s = self._backend.config.timeouts.queue
        actions, error = self.flow.tick(now, registry.ready), self.flow.error
        if self.flow.ended and error is not None and error.reason is Reason.OVERLOADED:
            error.retry_after_s = self._backend.admission.drained_in() or error.retry_after_s
        self.perform(actions)
        if not self.flow.ended:
            self._arm()

    def _due_since(self, now: float) -> float:
        """Since when progress is due: while the request waits for others, none is."""
        due = (self._workers[sub].watch.due_since(now) for sub in self.flow.open)
        return now if self.flow.waits else max([self.flow.progress, *due])

    def _finish(self) -> None:
        self._health.budget.end(self._loop.time())
        self.job.tenant.running.add(-1, -self._tokens)
        for handle in (self._timer, self._again):
            if handle is not None:
                handle.cancel()
        if self._ticket is not None:
            self._backend.admission.leave(self._ticket)
            self._ticket = None
        flow = self.flow
        if self.tokens_at is not None:
            self._spans.first_token(self.tokens_at)
            if flow.stage is Stage.DONE:
                tpot_s = (self._loop.time() - self.tokens_at) / max(len(flow.outputs) - 1, 1)
                self._backend.demand.ended(self.tokens_at - self.job.received, tpot_s, self.slo)
        error = "" if flow.stage is Stage.DONE else str(flow.error)
        tokens = {"millrace.output_tokens": len(flow.outputs), "millrace.cached_tokens": self.cached_tokens}
        self._spans.over(self._loop.time(), tokens, error)


class _LinkedSubRequest:
    """One sub-request of one attempt, registered on its Link."""

    __slots__ = ("_flow", "_generation", "_link", "_sub", "attempt", "exports", "heard", "replica", "waits")

    def __init__(self, generation: Generation, sub: SubRequest, link: Link, replica: int) -> None:
        self.attempt, self.replica, self.exports = generation.flow.attempt, replica, sub is SubRequest.PREFILL
        self._generation = generation
        self._flow = generation.flow
        self.heard = self.waits = False
        self._sub = sub
        self._link = link

    def on_output(self, out: worker_pb2.SequenceOutput, now: float) -> None:
        flow, generation = self._flow, self._generation
        if not self.heard and out.token_ids:
            self.heard = True
            generation.heard(self._sub)
        if generation.tokens_at is None and out.token_ids:
            if not generation.begins():
                self._link.abort(generation.room, self.attempt, "other weights")
                self.on_failure(MillraceError(Reason.EPOCH_CHANGED, "the answer began with other weights"))
                return
            generation.tokens_at = now
            generation.cached_tokens = out.cached_tokens
            generation.usage.host_cached_prompt_tokens = out.host_cached_tokens
            generation.usage.fetched_prompt_tokens = out.fetched_tokens
        if out.finish_reason:
            generation.attempt_ended(out)
        actions = flow.output(self._sub, out, now)
        if self._sub not in flow.open and flow.stage is not Stage.HANDOVER:  # there the worker's pages are still read
            self._link.forget(generation.room)
        if actions or flow.stage is not generation.stage:
            generation.perform(actions)
        else:  # nearly always
            generation.wake()

    def on_wait(self, over: bool, now: float) -> None:
        self.waits = not over
        self._flow.wait(self._sub, over, now)

    def on_failure(self, error: MillraceError) -> None:
        self._generation.perform(self._flow.sub_failed(self._sub, error, asyncio.get_running_loop().time()))
