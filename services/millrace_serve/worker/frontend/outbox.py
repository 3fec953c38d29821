"""Outputs that wait for one router. The number of entries is bounded without dropping any: while a router is slow, the
outputs of one sequence are merged into one entry, or one per MAX_TOKENS.
"""

import collections

from millrace.v1 import worker_pb2

from millrace_serve.engine.core import RequestId, SequenceOutput
from millrace_serve.worker.frontend import convert

MAX_TOKENS = 4096  # of one entry and of one message: with 20 logprobs each, a tenth of what the transport takes


class LinkOutbox:
    def __init__(self) -> None:
        self._entries: collections.deque[worker_pb2.SequenceOutput] = collections.deque()
        self._latest: dict[RequestId, worker_pb2.SequenceOutput] = {}  # the last entry of each sequence

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, output: SequenceOutput) -> None:
        wire, waiting = convert.wire_output(output), self._latest.get(output.id)
        if waiting is None or len(waiting.token_ids) + len(wire.token_ids) > MAX_TOKENS:
            self._entries.append(wire)
            self._latest[output.id] = wire
        else:
            wire.first_index = waiting.first_index
            waiting.MergeFrom(wire)

    def take(self) -> list[worker_pb2.SequenceOutput]:
        """The next message's worth, oldest first."""
        taken: list[worker_pb2.SequenceOutput] = []
        budget = MAX_TOKENS
        while self._entries and (not taken or len(self._entries[0].token_ids) <= budget):
            entry = self._entries.popleft()
            budget -= len(entry.token_ids)
            id = RequestId(entry.id.room, entry.id.attempt)  # a refusal may be of what no request may be
            if self._latest.get(id) is entry:
                del self._latest[id]
            taken.append(entry)
        return taken
