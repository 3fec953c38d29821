"""Readers of recorded loads, in three public formats.

Mooncake (JSON lines, one request each):
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}
    {"session_id": "a", "delay": 1736.0, "input_length": 704, "output_length": 939, "hash_ids": [70, 71]}
`timestamp` and `delay` are in milliseconds. `hash_ids` has one id for each block of 512 prompt tokens, the last block
may be shorter; equal ids stand for equal blocks after equal blocks. The trace has no tokens: each id gets random ones.
Requests of one `session_id` are the turns of a conversation: the later ones have the new tokens only, and come `delay`
after the answer before them.

AIPerf's dag_jsonl (JSON lines, one conversation each):
    {"session_id": "a", "turns": [{"messages": [{"role": "user", "content": "…"}], "max_tokens": 9, "spawns": ["b"]}]}
The texts of the messages are sent, without roles. `forks` begin with all that was said so far, and end the conversation
unless they are in the background. `spawns` begin anew; the turn `join_at`, else the next one, waits for them.

ShareGPT (one JSON list of conversations):
    {"id": "…", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}
Texts of humans are sent; of the recorded answers only the length counts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError, model_validator

from millrace_load.replay import BLOCK, Blocks, Recorded, RecordedBranch, Session
from millrace_load.workload import WorkloadError

M = TypeVar("M", bound=BaseModel)


class Row(BaseModel):
    """What is read of a JSON object; other fields do not matter."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class AnyRow(Row):
    turns: list[Any] | None = None


class MooncakeRow(Row):
    timestamp: float | None = Field(None, ge=0)
    delay: float = Field(0.0, ge=0)
    session_id: str | None = None
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[int]

    @model_validator(mode="after")
    def _covered(self) -> Self:
        needed, given = -(-self.input_length // BLOCK), len(self.hash_ids)
        if given != needed:
            raise ValueError(f"hash_ids must have {needed} ids for input_length {self.input_length}, not {given}")
        return self

    def recorded(self) -> Recorded:
        return Recorded(Blocks(self.hash_ids, self.input_length), self.output_length, self.delay / 1000)


def _text(content: Any) -> Any:
    """Of a message's content, which may have parts."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else content


def _or_name(wrap: Callable[[str], dict[str, Any]]) -> BeforeValidator:
    return BeforeValidator(lambda value: wrap(value) if isinstance(value, str) else value)


class DagMessage(Row):
    content: Annotated[str, BeforeValidator(_text)] = ""


class Fork(Row):
    child: str
    background: bool = False


class Spawn(Row):
    children: list[str] = Field(min_length=1)
    join_at: int | None = None


class DagTurn(Row):
    messages: list[DagMessage] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    delay: float = Field(0.0, ge=0)
    forks: list[Annotated[Fork, _or_name(lambda name: {"child": name})]] = Field([])
    spawns: list[Annotated[Spawn, _or_name(lambda name: {"children": [name]})]] = Field([])


class DagRow(Row):
    session_id: str
    turns: list[DagTurn] = Field(min_length=1)
    pre_session_spawns: list[str] = Field([])
    context_mode: Literal["deltas_without_responses"] | None = None
    orchestrator: Literal[False] = False

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for i, turn in enumerate(self.turns):
            if i + 1 < len(self.turns) and not all(fork.background for fork in turn.forks):
                raise ValueError(f"turns.{i}.forks ends the conversation, which has more turns")
            for spawn in turn.spawns:
                if spawn.join_at is not None and not i < spawn.join_at < len(self.turns):
                    raise ValueError(f"turns.{i}.spawns: join_at must be a later turn, not {spawn.join_at}")
        return self


class Message(Row):
    sender: str = Field(alias="from")
    value: str


class Talk(Row):
    conversations: list[Message]


class Talks(RootModel[list[Talk]]):
    model_config = ConfigDict(strict=True)


def read_trace(path: Path, most: int) -> list[Session]:
    """The first `most` conversations of a file of JSON lines. WorkloadError names the file, the line and the field."""
    lines = {f"{path}:{number}": line for number, line in enumerate(_read(path).split("\n"), 1) if line.strip()}
    if not lines:
        raise WorkloadError(f"{path}: no requests")
    first = next(iter(lines))
    if _parsed(AnyRow, first, lines[first]).turns is None:
        return _mooncake(lines, most)
    return _dag({where: _parsed(DagRow, where, line) for where, line in lines.items()})[:most]


def _mooncake(lines: Mapping[str, str], most: int) -> list[Session]:
    """In the order of their times, counted from the first one, if any has a time."""
    rows: dict[str, list[MooncakeRow]] = {}
    for where, line in lines.items():
        row = _parsed(MooncakeRow, where, line)
        name = where if row.session_id is None else row.session_id
        if name in rows and row.timestamp is not None:
            raise WorkloadError(f"{where}: timestamp: later turns of a session have a delay")
        if name in rows or len(rows) < most:
            rows.setdefault(name, []).append(row)
    starts = {name: turns[0].timestamp or 0.0 for name, turns in rows.items()}
    begin = min(starts.values())
    timed = any(turns[0].timestamp is not None for turns in rows.values())
    return [
        Session([row.recorded() for row in rows[name]], (start - begin) / 1000 if timed else None)
        for name, start in sorted(starts.items(), key=lambda item: item[1])
    ]


def _dag(lines: Mapping[str, DagRow]) -> list[Session]:
    """Those that are no branch of another one."""
    rows, branches = {row.session_id: row for row in lines.values()}, set[str]()

    def session(name: str, around: tuple[str, ...]) -> Session:
        row, turns = rows[name], list[Recorded]()
        where = next(where for where, each in lines.items() if each is row)

        def branch(child: str, inherits: bool = False, join_at: int | None = None) -> RecordedBranch:
            if child not in rows or child in around:
                why = "is in no line" if child not in rows else "is a branch of itself"
                raise WorkloadError(f"{where}: session_id {child!r} {why}")
            branches.add(child)
            return RecordedBranch(session(child, (*around, child)), inherits, join_at)

        for i, turn in enumerate(row.turns):
            following = i + 1 if i + 1 < len(row.turns) else None
            begun = [branch(fork.child, inherits=True) for fork in turn.forks]
            begun += [branch(name, join_at=it.join_at or following) for it in turn.spawns for name in it.children]
            said = "\n" * bool(i) + "\n".join(message.content for message in turn.messages)
            turns.append(Recorded(said, turn.max_tokens, turn.delay / 1000, begun))
        return Session(turns, None, [branch(child) for child in row.pre_session_spawns])

    if len(rows) < len(lines):
        where = next(where for where, row in lines.items() if row is not rows[row.session_id])
        raise WorkloadError(f"{where}: session_id {lines[where].session_id!r} is in another line, too")
    sessions = {name: session(name, (name,)) for name in rows}
    return [found for name, found in sessions.items() if name not in branches]


def read_sharegpt(path: Path, most: int, turns: int) -> list[Session]:
    """The first `turns` exchanges of the first `most` conversations that have one: a human's text and its answer.
    WorkloadError names the file, the conversation and the field.
    """
    talks = _parsed(Talks, str(path), _read(path)).root
    found = (list(islice(_exchanges(talk.conversations), turns)) for talk in talks)
    sessions = [Session(exchanges) for exchanges in islice(filter(None, found), most)]
    if not sessions:
        raise WorkloadError(f"{path}: no conversation has a text of a human and its answer")
    return sessions


def _exchanges(messages: Sequence[Message]) -> Iterator[Recorded]:
    """From the first human's text on, as long as a human and gpt take turns and say something."""
    first = next((i for i, message in enumerate(messages) if message.sender == "human"), len(messages))
    for asked, answer in zip(messages[first::2], messages[first + 1 :: 2], strict=False):
        if (asked.sender, answer.sender) != ("human", "gpt") or not asked.value.strip() or not answer.value.strip():
            return
        yield Recorded(asked.value, answer.value, 0.0 if asked is messages[first] else None)


def _read(path: Path) -> str:
    """Bytes that are not UTF-8 become U+FFFD, which JSON has in strings only."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None


def _parsed(kind: type[M], where: str, text: str) -> M:
    """What a JSON text says. WorkloadError names the first field that is wrong."""
    try:
        whole = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")  # half of a pair is no UTF-8
        return kind.model_validate_json(whole)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}: no JSON: {error}") from None
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        field, given = ".".join(map(str, mistake["loc"])), mistake["input"]
        rest = f", not {json.dumps(given)[:40]}" if field and not isinstance(given, dict) else ""
        said = mistake["msg"].removeprefix("Value error, ")
        raise WorkloadError(f"{where}: {field}{': ' * bool(field)}{said}{rest}") from None
