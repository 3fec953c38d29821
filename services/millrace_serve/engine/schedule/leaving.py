"""How a sequence leaves a scheduler.

A sequence that leaves (finished, preempted, held) gives its slot and pages back at once when no launched step names
it, otherwise with the commit of the last such step. Only then may another sequence have them.
"""

import abc

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import Failure, FinishReason
from millrace_serve.engine.schedule.expected import Outputs
from millrace_serve.engine.schedule.outbox import Outbox
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.sequence import KvWriter, Phase, Sequence
from millrace_serve.engine.schedule.speeds import Speeds


class Leaving(abc.ABC):
    def __init__(self, config: EngineConfig, requests: EngineRequests, pages: Pages, speeds: Speeds) -> None:
        self.config, self.requests, self.pages, self.speeds = config, requests, pages, speeds
        self.outbox = Outbox()
        self.outputs = Outputs()
        self.leaving: set[Sequence] = set()  # have left, but a launched step still names them
        self.num_held = 0

    @abc.abstractmethod
    def _take_off(self, seq: Sequence) -> None:
        """Remove `seq` from every list of those that will be scheduled."""

    def _stop(self, seq: Sequence, finish: FinishReason, error: Failure | None = None) -> None:
        """End a request in any phase but HELD and DONE."""
        self.outbox.report(seq, [], finish, error)
        self._take_off(seq)
        self._leave(seq, Phase.DONE)

    def _preempt(self, seq: Sequence) -> None:
        """`seq` gives its pages up and returns to the queue, to be computed again."""
        self._take_off(seq)
        seq.preempted, seq.num_known = True, seq.num_computed
        self.outbox.counters["preemptions"] += 1
        self._leave(seq, Phase.WAITING)

    def _leave(self, seq: Sequence, phase: Phase) -> None:
        """`seq`, already taken off, goes to WAITING, HELD or DONE. A prompt of which another worker may read pages
        stays held until its lease ends.
        """
        if phase is Phase.DONE and seq.num_published:
            phase = Phase.HELD
        ended = phase is Phase.DONE and seq.phase is Phase.RUNNING
        if ended and seq.num_outputs and not seq.exports and not seq.request.warms:
            self.outputs.ended(seq.num_outputs)
        if phase is not Phase.WAITING:
            self.requests.num_active -= 1
        self.num_held += phase is Phase.HELD
        seq.enter(phase)
        self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Free what a sequence that has left still holds, unless a launched step or a transfer uses it."""
        if seq.kv is KvWriter.READING:
            return
        if not seq.inflight and seq.phase is Phase.WAITING and self.pages.save(seq, lambda: self._saved(seq)):
            seq.inflight += 1
        if seq.inflight:
            self.leaving.add(seq)
        else:
            self._free(seq)

    def _saved(self, seq: Sequence) -> None:
        """There are copies now of the pages that it gives up."""
        seq.inflight -= 1
        if seq.phase is Phase.WAITING:
            self._free(seq)
        else:
            self._settle(seq)

    def _free(self, seq: Sequence) -> None:
        self.leaving.discard(seq)
        self.pages.free_slot(seq)
        if seq.phase is Phase.HELD:
            self.pages.hold(seq)
            return
        self.pages.release(seq)
        if seq.phase is Phase.WAITING:
            self._enqueue(seq)
        else:
            del self.requests.live[seq.id]

    def _enqueue(self, seq: Sequence) -> None:
        left, most = 0 if seq.imports else len(seq.tokens), self.config.max_prefill_tokens
        if self.config.length_class(left):
            left -= max(self.pages.num_cached(seq), seq.num_offered) * self.pages.size
        times = self.speeds.times  # behind a step that is full of other prompts
        takes_s = times.step_s(tokens=most) + times.prompt_s(left, len(seq.tokens) - left, most)
        self.requests.waiting.push(seq, self.config.length_class(left), takes_s)

    def _end_parking(self, seq: Sequence) -> None:
        """The lease of its published pages has ended."""
        self.num_held -= 1
        seq.enter(Phase.DONE)
        if seq.inflight:  # aborted an instant ago: the commit of its last step frees its pages
            self.pages.unpublish(seq)
        else:
            self.pages.release_held(seq)
            del self.requests.live[seq.id]
