"""Outputs that wait for one router. The number of entries is bounded without dropping any: while a router is slow, the
outputs of one sequence are merged into one entry, or one per MAX_TOKENS.
"""

from __future__ import annotations

import collections

import msgspec

from millrace_serve.engine.core import RequestId, SequenceOutput

MAX_TOKENS = 4096  # of one entry and of one message: with 20 logprobs each, a tenth of what the transport takes


class LinkOutbox:
    def __init__(self) -> None:
        self._entries: collections.deque[SequenceOutput] = collections.deque()  # its owner may extend their tokens
        self._latest: dict[RequestId, SequenceOutput] = {}  # the last entry of each sequence

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, output: SequenceOutput) -> None:
        waiting = self._latest.get(output.id)
        if waiting is None or len(waiting.tokens) + len(output.tokens) > MAX_TOKENS:
            self._entries.append(output)
            self._latest[output.id] = output
        else:
            waiting.tokens.extend(output.tokens)
            if output.finish is not None:  # a new object with the end, because outputs are frozen
                last = msgspec.structs.replace(
                    waiting,
                    finish=output.finish,
                    error=output.error,
                    num_drafted=output.num_drafted,
                    num_accepted=output.num_accepted,
                )
                self._entries[self._entries.index(waiting)] = self._latest[output.id] = last

    def take(self) -> list[SequenceOutput]:
        """The next message's worth, oldest first."""
        taken: list[SequenceOutput] = []
        budget = MAX_TOKENS
        while self._entries and (not taken or len(self._entries[0].tokens) <= budget):
            entry = self._entries.popleft()
            budget -= len(entry.tokens)
            if self._latest.get(entry.id) is entry:
                del self._latest[entry.id]
            taken.append(entry)
        return taken
