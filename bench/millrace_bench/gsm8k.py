"""Items from a GSM8K-style JSONL file: one {"question": …, "answer": "… #### N"} a line."""

import json
from pathlib import Path

from millrace_bench.tasks import Item, Match, Message, final_number

MARK = "####"


def read_items(path: str | Path, shots: int = 0, max_tokens: int = 512) -> list[Item]:
    """The file's first `shots` lines become worked examples before each of the remaining questions.

    Raises:
        ValueError: a line is not such an object, or the file has no question after its `shots` examples.
    """
    rows = [
        _row(line, f"{path}:{n}")
        for n, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1)
        if line.strip()
    ]
    if len(rows) <= shots:
        raise ValueError(f"{path}: shots={shots} leaves no question of its {len(rows)}")
    worked = ((Message("user", question), Message("assistant", answer)) for question, answer in rows[:shots])
    examples = tuple(message for pair in worked for message in pair)
    return [
        Item(
            "gsm8k",
            question,
            (*examples, Message("user", question)),
            str(final_number(answer)),
            Match.NUMBER,
            max_tokens,
        )
        for question, answer in rows[shots:]
    ]


def _row(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(field), str) for field in ("question", "answer")):
        raise ValueError(f"{where}: expected an object with the strings question and answer")
    if MARK not in row["answer"] or final_number(row["answer"]) is None:
        raise ValueError(f"{where}: answer has no '{MARK} number'")
    return row["question"], row["answer"]
