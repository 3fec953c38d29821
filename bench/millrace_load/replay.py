"""From recorded conversations (traces.py) to the requests of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from millrace_load.workload import (
    Branch,
    Conversation,
    Distribution,
    Plan,
    Prompt,
    Turn,
    WorkloadError,
    prompt,
    vocabulary,
)

BLOCK = 512  # tokens


class Blocks(NamedTuple):
    """The first `length` tokens of the blocks with these ids."""

    ids: Sequence[int]
    length: int


class Recorded(NamedTuple):
    """One turn. The tokens of texts are still to be counted."""

    said: Blocks | str
    answer: int | str  # tokens, or a text that has as many
    delay_s: float | None = 0.0  # after the answer before it; None: not recorded
    branches: "Sequence[RecordedBranch]" = ()


class Session(NamedTuple):
    """One conversation."""

    turns: Sequence[Recorded]
    start_s: float | None = None
    branches: "Sequence[RecordedBranch]" = ()  # that begin with it

    def everything(self) -> Iterator[Recorded]:
        """The turns, with those of its branches."""
        yield from self.turns
        for branch in (*self.branches, *(branch for turn in self.turns for branch in turn.branches)):
            yield from branch.session.everything()


class RecordedBranch(NamedTuple):
    """As `Branch`."""

    session: Session
    inherits: bool
    join_at: int | None


class _Texts(dict[int, list[Any]]):
    """The tokens or words of blocks, by id."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._words, self._seed = vocabulary(vocab_size), seed

    def __missing__(self, id: int) -> list[Any]:
        self[id] = Random(f"{self._seed}:{id}").choices(self._words, k=BLOCK)
        return self[id]

    def prompt(self, said: Blocks, later: bool) -> Prompt:
        return prompt([part for id in said.ids for part in self[id]][: said.length], later)


@dataclass(frozen=True, slots=True)
class Replay:
    """`num_tokens` has every text of the sessions. Without a vocabulary blocks are words. Times are divided by `speed`;
    `think` has those that were not recorded.
    """

    num_tokens: Mapping[str, int]
    vocab_size: int
    think: Distribution
    max_context: int
    seed: int
    speed: float = 1.0

    def plan(self, sessions: Sequence[Session]) -> Plan:
        """Conversations end before the turn that does not fit the context. WorkloadError: none has a turn that fits."""
        texts, rng = _Texts(self.vocab_size, self.seed), Random(self.seed)
        found = [self._conversation(item, i, self.max_context, texts, rng) for i, item in enumerate(sessions)]
        plan = Plan(tuple(item for item in found if item.turns))
        if not plan.conversations:
            raise WorkloadError(f"no recorded request fits into the model's context of {self.max_context} tokens")
        total = sum(1 for session in sessions for _ in session.everything())
        return Plan(plan.conversations, total - plan.num_requests)

    def _conversation(self, session: Session, index: int, room: int, texts: _Texts, rng: Random) -> Conversation:
        """`room`: of the context, in tokens."""

        def begun(branches: Sequence[RecordedBranch]) -> tuple[Branch, ...]:
            found = []
            for item, inherits, join_at in branches:
                own = self._conversation(item, index, room if inherits else self.max_context, texts, rng)
                found += [Branch(own, inherits, join_at)] if own.turns else []
            return tuple(found)

        before, turns = begun(session.branches), list[Turn]()
        for said, answer, delay_s, branches in session.turns:
            max_tokens = answer if isinstance(answer, int) else self.num_tokens[answer]
            room -= max_tokens + (self.num_tokens[said] if isinstance(said, str) else said.length)
            if room < 0:
                break
            think_s = self.think.seconds(rng) if delay_s is None else delay_s / self.speed
            text = said if isinstance(said, str) else texts.prompt(said, later=bool(turns))
            turns.append(Turn(text, max_tokens, rng.getrandbits(63), think_s, begun(branches)))
        start_s = None if session.start_s is None else session.start_s / self.speed
        return Conversation(index, tuple(turns), start_s, before)
