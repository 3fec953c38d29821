"""A simulated worker: it runs steps, each as long as the times of a step say. If steps of few rows are shorter, because
they read few experts, it has to learn the times, as an engine does.

1. A step has a token of each running sequence, and chunks of prompts: as many tokens as one step may have and, beside
   sequences with a TPOT limit, as their limit leaves. Prompts for other workers take whole chunks beside them.
2. A prompt whose output another worker generates is handed over at its end. Another goes on here.
3. Sequences run while the pool has room, by the functions of the engine that admit, preempt and promise room.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from millrace_common.step_times import AIM, RECOVER, StepTimes, chunk_pairs, tokens_left
from millrace_router.flow.flow import SubRequest
from millrace_router.policy.snapshot import Replica
from millrace_serve.engine.schedule.capacity import QUEUE_S
from millrace_serve.engine.schedule.expected import Outputs, need, room
from millrace_serve.engine.schedule.plan import Work
from millrace_serve.engine.schedule.step_fit import StepFit
from millrace_serve.engine.schedule.waiting import LOOK_S

Fleet: TypeAlias = Any  # of fleet.py, which imports this file
Job: TypeAlias = Any

PAGE = 64  # tokens
AMPLE = 4  # pools with so many times the tokens that are in use need no exact look
UNREAD = 0.75  # of the experts, by each row: of 32, it reads 8
MOST_PROMPTS = 320  # of a prefill worker


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker is."""

    times: StepTimes
    experts_s: float = 0.0  # of times.fixed_s: reading all experts
    pool: int = 1 << 20  # tokens
    chunk: int = 2048  # prompt tokens of a step
    max_running: int = 256
    tpot_s: float = math.inf  # steps with running sequences take no longer because of prompts
    handover_s: float = 0.0
    page_bytes: int = 0
    read_bytes_per_s: float = 0.0

    def step_s(self, work: Work) -> float:
        return self.times.step_s(*work) - self.experts_s * UNREAD ** (work.sequences + work.tokens)

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.chunk / self.times.step_s(tokens=self.chunk, pairs=self.chunk * self.chunk / 2)


@dataclass(slots=True, eq=False)
class Part:
    """An attempt at one worker."""

    job: Job
    sub: SubRequest
    attempt: int
    order: int
    came: float
    tokens: int  # of the prompt, replayed outputs included
    goal: int  # outputs of this attempt
    computed: int = 0  # of the prompt and, after a preemption, of the outputs
    made: int = 0  # outputs, until it began to run last
    began: int = 0  # the worker's number of steps then
    due_s: float = 0.0  # token n is due at `due_s` + n x AIM x the TPOT limit
    heard: int = 0  # outputs that the router knows
    waits: bool = False  # as the router was told
    started: bool = False  # some of it was computed
    gone: bool = False


class Worker:
    def __init__(self, fleet: Fleet, name: str, role: str, machine: Machine, seen: Sequence[int]) -> None:
        """`seen`: lengths of earlier outputs."""
        self.fleet, self.name, self.role, self.machine = fleet, name, role, machine
        self.duty = role if role != "flexible" else "both"
        self.outputs = Outputs()
        for length in seen:
            self.outputs.ended(length)
        self.prompts: deque[Part] = deque()
        self.expected: dict[Job, Part] = {}  # their prompts are being computed elsewhere
        self.waiting: list[tuple[int, Part]] = []  # what came from elsewhere, or was preempted
        self.running: dict[Part, None] = {}
        self._ends: list[tuple[int, int, Part]] = []  # by the step in which they end
        self.keys = 0  # tokens of running sequences
        self._begun = 0  # tokens of prompts that were begun and stay here
        self._prompt_tokens = 0  # to be computed
        self._steps = self.computed = self.generated = 0
        self._busy = False
        self._fit = StepFit(machine.times)

    @property
    def times(self) -> StepTimes:
        """As it knows them."""
        return self._fit.times

    # ------------------------------------------------------------------------------------- what the router sends

    def add(self, part: Part, cached: int, after_s: float = 0.0) -> None:
        """A prompt, of which `cached` tokens need no computing, once they are here."""
        part.computed = cached
        self._prompt_tokens += part.tokens - cached
        self.fleet.after(after_s, lambda: self._queue(part))

    def expect(self, part: Part) -> None:
        """A sequence whose prompt is computed elsewhere."""
        part.made = 1
        self.expected[part.job] = part

    def arrived(self, job: Job) -> None:
        if part := self.expected.pop(job, None):
            part.computed = _length(part)
            heapq.heappush(self.waiting, (part.order, part))
            self._step()

    def drop(self, job: Job) -> None:
        self.expected.pop(job, None)
        for part in [part for part in (*self.prompts, *self.running) if part.job is job]:
            self._leave(part)
        self.waiting = [entry for entry in self.waiting if entry[1].job is not job]
        heapq.heapify(self.waiting)

    # ------------------------------------------------------------------------------------- steps

    def _queue(self, part: Part) -> None:
        if not part.gone:
            self.prompts.append(part)
            self._step()

    def _step(self) -> None:
        """Begin the next step, if none is under way and there is anything to do."""
        if self._busy:
            return
        self._admit()
        chunks = self._chunks()
        if not chunks and not self.running:
            return
        tokens = sum(count for _, count in chunks)
        pairs = sum(chunk_pairs(part.computed, count) for part, count in chunks)
        self._busy = True
        work = Work(len(self.running), self.keys, tokens, pairs)
        seconds = self.machine.step_s(work)
        if self.machine.experts_s:
            self._fit.add(work, seconds)
        self.fleet.after(seconds, lambda: self._end(chunks))

    def _chunks(self) -> list[tuple[Part, int]]:
        machine, (most, most_s), parts, rests = self.machine, self._most_tokens(), list[Part](), list[int]()
        places = machine.max_running - len(self.running)
        for part in self.prompts:
            if tokens_left(rests, most, machine.chunk) <= 0 or not self._begins(part, places):
                break
            part.started = True
            parts.append(part)
            rests.append(_length(part) - part.computed)
            places -= part.sub is SubRequest.DECODE
        starts = [part.computed for part in parts]
        shares = self.times.divide(list(zip(starts, rests, strict=True)), most, machine.chunk, most_s)
        return [(part, tokens) for part, tokens in zip(parts, shares, strict=True) if tokens]

    def _most_tokens(self) -> tuple[int, float]:
        """Prompt tokens of the next step and their time, by the engine's rule (engine/schedule/prompts.py)."""
        machine = self.machine
        if not self.running or not self.prompts:
            return machine.chunk, math.inf
        for part in self.prompts:
            if part.sub is SubRequest.PREFILL:
                return machine.chunk, math.inf
            if not part.started:
                break
        _, start = min((_length(part) - part.computed, part.computed) for part in self.prompts)
        wanted, work = min(self._prompt_tokens, machine.chunk), (len(self.running), self.keys)
        most, most_s = self.times.beside(machine.tpot_s, self._spare_s(), *work, start, wanted, PAGE)
        return min(most, machine.chunk), most_s

    def _spare_s(self) -> float:
        """As in engine/schedule/streams.py."""
        now, aim_s, spare_s = self.fleet.now, AIM * self.machine.tpot_s, math.inf
        step_s, worst_s = self.times.step_s(len(self.running), self.keys), -self.times.prompts_s(self.machine.chunk)
        recover, saved_s = min(self.outputs.lower_quartile, RECOVER), aim_s - step_s
        for part in self.running:
            made = self._made(part)
            rest = min(part.job.request.max_tokens - made, recover)
            own_s = part.due_s + aim_s * made - now + rest * saved_s
            kept_s = max(worst_s, min(own_s, 2 * RECOVER * max(saved_s, 0.0)))
            part.due_s += kept_s - own_s
            spare_s = min(spare_s, kept_s)
        return spare_s

    def _begins(self, part: Part, places: int) -> bool:
        """Whether a prompt can go on, or begin: one that stays here needs a place and pages."""
        if part.sub is SubRequest.PREFILL or part.began < 0:
            return True
        if places <= 0 or not self._fits(part):
            return False
        part.began = -1
        self._begun += _length(part)
        return True

    def _end(self, chunks: list[tuple[Part, int]]) -> None:
        self._busy = False
        self._steps += 1
        self.keys += len(self.running)
        self.generated += len(self.running)
        while self._ends and self._ends[0][0] <= self._steps:
            part = heapq.heappop(self._ends)[2]
            if part in self.running:
                self._finish(part)
        for part, count in chunks:
            self.computed += count
            if not part.gone:
                part.computed += count
                self._prompt_tokens -= count
                if part.computed >= _length(part):
                    self._first_token(part)
        while len(self.running) > 1 and self.keys + self._begun > self.machine.pool:
            self._preempt(max(self.running, key=lambda part: part.order))
        self._step()

    def _first_token(self, part: Part) -> None:
        self.prompts.remove(part)
        if part.sub is SubRequest.PREFILL:
            part.job.prefilled(self, part)
            return
        self._begun -= _length(part)
        self._run(part, part.made + 1)
        part.job.hear(self, part, part.made)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.machine.max_running and self._fits(self.waiting[0][1]):
            part = heapq.heappop(self.waiting)[1]
            if part.computed < _length(part):
                part.began = 0
                self._prompt_tokens += _length(part) - part.computed
                self.prompts.appendleft(part)
                return
            self._run(part, part.made)

    def _run(self, part: Part, made: int) -> None:
        part.made, part.began, part.due_s = made, self._steps, self.fleet.now - AIM * self.machine.tpot_s * made
        if made >= part.goal:
            self._ended(part)
            return
        self.running[part] = None
        self.keys += part.tokens + made
        heapq.heappush(self._ends, (self._steps + part.goal - made, part.order, part))

    def _finish(self, part: Part) -> None:
        self._stop(part)
        self._ended(part)

    def _ended(self, part: Part) -> None:
        self.outputs.ended(part.made)
        part.job.hear(self, part, part.made)

    def _stop(self, part: Part) -> None:
        """It runs no longer."""
        del self.running[part]
        part.made += self._steps - part.began
        self.keys -= part.tokens + part.made

    def _preempt(self, part: Part) -> None:
        self._stop(part)
        part.computed, part.started = 0, False
        self._ends = [entry for entry in self._ends if entry[2] is not part]
        heapq.heapify(self._ends)
        heapq.heappush(self.waiting, (part.order, part))

    def _leave(self, part: Part) -> None:
        part.gone = True
        if part in self.running:
            self._stop(part)
            return
        self.prompts.remove(part)
        self._prompt_tokens -= _length(part) - part.computed
        if part.began < 0:
            self._begun -= _length(part)

    def _fits(self, part: Part) -> bool:
        machine, used = self.machine, self.keys + self._begun
        if not self.running or AMPLE * (used + _length(part) + part.goal) < machine.pool:
            return True
        rests = [(self._rest(one, self.outputs.rest), one.tokens + self._made(one)) for one in self.running]
        rests.append((self._rest(part, self.outputs.rest), 0))
        return used + _length(part) + max(need(rests), len(self.running)) <= machine.pool

    def _rest(self, part: Part, rest: Callable[[int, int], int]) -> int:
        made = self._made(part)
        return min(rest(made, part.order), part.job.request.max_tokens - made)

    def _made(self, part: Part) -> int:
        return part.made + (self._steps - part.began if part in self.running else 0)

    # ------------------------------------------------------------------------------------- what it tells

    def tell(self, now: float) -> None:
        """The router hears what was made, and what waits."""
        for part in self.running:
            part.job.hear(self, part, self._made(part))
        goes_on = [*self.running, *(part for part in self.prompts if part.started)]
        waits = [*(part for _, part in self.waiting), *(part for part in self.prompts if not part.started)]
        for part in goes_on:
            part.job.told(self, part, waits=False)
        for part in waits:
            part.job.told(self, part, waits=now > part.came + LOOK_S)

    def replica(self) -> Replica:
        machine = self.machine
        streams = [*self.running, *(part for _, part in self.waiting), *self.expected.values()]
        streams += [part for part in self.prompts if part.sub is SubRequest.DECODE]
        exports = sum(part.sub is SubRequest.PREFILL for part in self.prompts)
        generates = self.role != "prefill"
        most = machine.max_running + machine.max_running // 8 + 1 if generates else MOST_PROMPTS
        return Replica(
            self.name, 0, self.name, "f",
            capacity=most - len(streams) - exports,
            tokens=self._prompt_tokens,
            sequences=len(streams) + exports,
            sources=self.fleet.sources if generates else frozenset(),
            held=self.keys,
            room=self._room(streams),
            expected_output=self.outputs.mean if generates else 0,
            page_bytes=machine.page_bytes,
            read_bytes_per_s=machine.read_bytes_per_s,
            times=self.times,
            streams=len(self.running) if self.duty == "prefill" else len(streams) + exports,
            flexible=self.role == "flexible",
        )  # fmt: skip

    def _room(self, streams: list[Part]) -> int:
        """Tokens of further requests."""
        pool = self.machine.pool
        if self.role == "prefill":
            return int(self.machine.prompt_tokens_per_s * QUEUE_S) - self._prompt_tokens
        if not streams:
            return pool
        held = sum(part.tokens + self._made(part) for part in streams)
        typical = min(self.outputs.mean, streams[0].job.request.max_tokens)
        if AMPLE * (held + len(streams) * typical) < pool:
            return pool - held - len(streams) * typical
        parts = [(self._rest(part, self.outputs.expected), part.tokens + self._made(part)) for part in streams]
        return room(pool - held, parts, typical)


def _length(part: Part) -> int:
    """Tokens to compute before it runs: after a preemption the outputs too."""
    return part.tokens + (part.made if part.sub is SubRequest.DECODE else 0)
