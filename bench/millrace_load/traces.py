"""Recorded loads, from two public formats.

Mooncake (JSON lines, one request each, in the order of their times):
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}
`timestamp` is in milliseconds. `hash_ids` has one id for each block of 512 prompt tokens, the last block may be
shorter; equal ids stand for equal blocks after equal blocks. The tokens are not in the trace: each id gets random ones.

ShareGPT (one JSON list of conversations):
    {"id": "…", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}
Texts of humans are sent; of the recorded answers only the length counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TextIO

from millrace_load.workload import Conversation, Distribution, Plan, Turn, WorkloadError, prompt, vocabulary

BLOCK = 512  # tokens


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a Mooncake trace."""

    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Exchange(NamedTuple):
    said: str
    answer: str


def read_mooncake(path: Path, most: int) -> list[Recorded]:
    """The first `most` requests. WorkloadError names the file, the line and the field."""
    rows: list[Recorded] = []
    with _opened(path) as file:
        numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(numbered, most):
            rows.append(_row(f"{path}:{number}", line, rows[-1].timestamp if rows else 0))
    if not rows:
        raise WorkloadError(f"{path}: no requests")
    return rows


def plan_mooncake(rows: Sequence[Recorded], speed: float, vocab_size: int, max_context: int, seed: int) -> Plan:
    """At the recorded times, counted from the first request, divided by `speed`. Without a vocabulary: text."""
    words, blocks = vocabulary(vocab_size), dict[int, list]()
    items: list[Conversation] = []
    for row in rows:
        if row.input_length + row.output_length > max_context:
            continue
        parts: list = []
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = Random(f"{seed}:{hash_id}").choices(words, k=BLOCK)
            parts += blocks[hash_id]
        turn = Turn(prompt(parts[: row.input_length]), row.output_length, seed)
        start_s = (row.timestamp - rows[0].timestamp) / 1000 / speed
        items.append(Conversation(len(items), (turn,), start_s))
    return Plan(_some(items, max_context), len(rows) - len(items))


def read_sharegpt(path: Path, most: int, turns: int) -> list[list[Exchange]]:
    """The first `turns` exchanges of the first `most` conversations that have one: a human's text and its answer.
    WorkloadError names the file, the conversation and the field.
    """
    with _opened(path) as file:
        try:
            records = json.load(file)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{path}:{error.lineno}: no JSON: {error.msg}") from None
    if not isinstance(records, list):
        raise WorkloadError(f"{path}: not a list of conversations")
    messages = (_messages(f"{path}: [{i}]", record) for i, record in enumerate(records))
    found = (list(islice(_exchanges(item), turns)) for item in messages)
    talks = list(islice(filter(None, found), most))
    if not talks:
        raise WorkloadError(f"{path}: no conversation has a text of a human and its answer")
    return talks


def plan_sharegpt(
    talks: Sequence[Sequence[Exchange]], num_tokens: Mapping[str, int], think: Distribution, max_context: int, seed: int
) -> Plan:
    """`num_tokens` has every text of `talks`. A conversation ends before the turn that does not fit the context."""
    rng = Random(seed)
    items: list[Conversation] = []
    for talk in talks:
        room, turns = max_context, list[Turn]()
        for said, answer in talk:
            room -= num_tokens[said] + num_tokens[answer]
            if room < 0:
                break
            think_s = think.seconds(rng) if turns else 0.0
            turns.append(Turn(said, num_tokens[answer], rng.getrandbits(63), think_s))
        if turns:
            items.append(Conversation(len(items), tuple(turns)))
    plan = Plan(_some(items, max_context))
    return Plan(plan.conversations, sum(map(len, talks)) - plan.num_requests)


def _opened(path: Path) -> TextIO:
    """Bytes that are not UTF-8 become U+FFFD, which JSON has in strings only."""
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None


def _row(where: str, line: str, earliest: int) -> Recorded:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}: no JSON: {error.msg}") from None
    if not isinstance(record, dict):
        raise WorkloadError(f"{where}: no JSON object")
    timestamp = _whole(where, record, "timestamp", earliest)
    input_length = _whole(where, record, "input_length", 1)
    output_length = _whole(where, record, "output_length", 1)
    ids, needed = record.get("hash_ids"), -(-input_length // BLOCK)
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise WorkloadError(f"{where}: hash_ids must be a list of integers")
    if len(ids) != needed:
        raise WorkloadError(f"{where}: hash_ids must have {needed} ids for input_length {input_length}, not {len(ids)}")
    return Recorded(timestamp, input_length, output_length, tuple(ids))


def _whole(where: str, record: dict[str, Any], name: str, least: int) -> int:
    value = record.get(name)
    if type(value) is not int or value < least:
        raise WorkloadError(f"{where}: {name} must be an integer of at least {least}, not {json.dumps(value)}")
    return value


def _messages(where: str, record: Any) -> list[tuple[str, str]]:
    """(from, value) of each message."""
    messages = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise WorkloadError(f"{where}.conversations must be a list")
    return [
        (_text(f"{where}.conversations[{i}]", message, "from"), _text(f"{where}.conversations[{i}]", message, "value"))
        for i, message in enumerate(messages)
    ]


def _text(where: str, message: Any, key: str) -> str:
    value = message.get(key) if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise WorkloadError(f"{where}.{key} must be a string, not {json.dumps(value)[:40]}")
    return value.encode(errors="replace").decode()  # half of a surrogate pair is no UTF-8


def _exchanges(messages: Sequence[tuple[str, str]]) -> Iterator[Exchange]:
    """From the first human's text on, as long as a human and gpt take turns and say something."""
    first = next((i for i, (sender, _) in enumerate(messages) if sender == "human"), len(messages))
    for (asker, said), (answerer, answer) in zip(messages[first::2], messages[first + 1 :: 2], strict=False):
        if (asker, answerer) != ("human", "gpt") or not said.strip() or not answer.strip():
            return
        yield Exchange(said, answer)


def _some(items: list[Conversation], max_context: int) -> tuple[Conversation, ...]:
    if not items:
        raise WorkloadError(f"no recorded request fits into the model's context of {max_context} tokens")
    return tuple(items)
