"""How engines of the same work compare: graphs and compilation to none, drafts to none, and the best drafts by batch.

A row belongs to `variant` (engine.py) and `drafts`, the number for each sequence and step. Tokens per second compare
them: a step with drafts is longer, and gives more tokens. Where acceptance is drawn, `expected` tokens of a step count:
the drawn ones differ from them by some per cent in a hundred steps.
"""

from itertools import takewhile

from millrace_load.record import Row


def ratios(rows: list[Row]) -> list[Row]:
    """Of decode rows, to those of the first engine by batch."""
    first = {row["batch"]: row for row in reversed(rows)}
    return [
        {"kind": "ratio", "batch": row["batch"], **_engine(row), "speedup": _speedup(row, base)}
        for row in rows if _engine(row) != _engine(base := first[row["batch"]])
    ]  # fmt: skip


def best(rows: list[Row]) -> list[Row]:
    """The number of drafts with the most tokens per second, by batch, and what `limits.draft_batches` they make."""
    found: list[Row] = []
    for batch in sorted({row["batch"] for row in rows}):
        of_batch = [row for row in rows if row["batch"] == batch]
        fastest = max(of_batch, key=_rate)
        figures = {key: fastest[key] for key in ("drafts", "step_ms")}
        found.append({"kind": "best", "batch": batch, **figures, "speedup": _speedup(fastest, of_batch[0])})
    return [*found, {"kind": "draft_batches", "most": draft_batches({row["batch"]: row["drafts"] for row in found})}]


def draft_batches(best_of: dict[int, int]) -> list[int]:
    """Up to which batch at least 1, 2, … drafts are best at every batch. `best_of`: batch, ascending, to drafts."""
    return [_largest(best_of, drafts) for drafts in range(1, max(best_of.values()) + 1)]


def _largest(best_of: dict[int, int], drafts: int) -> int:
    return max(takewhile(lambda batch: best_of[batch] >= drafts, best_of), default=0)


def _engine(row: Row) -> Row:
    return {key: row[key] for key in ("variant", "drafts") if key in row}


def _speedup(row: Row, base: Row) -> float:
    return round(_rate(row) / _rate(base), 3)


def _rate(row: Row) -> float:
    """Tokens of a sequence per millisecond."""
    return row.get("expected", row["accept"]) / row["step_ms"]
