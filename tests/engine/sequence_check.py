"""The table of engine/schedule/sequence.py as assertions: what a sequence holds fits its phase."""

from __future__ import annotations

from millrace_serve.engine.schedule.sequence import Phase, Sequence, Transfer

TRANSFERS = {
    Phase.EXPECTED: {Transfer.AWAITED, Transfer.NONE},
    Phase.WAITING: {Transfer.NONE, Transfer.AWAITED},
    Phase.IMPORTING: {Transfer.READING},
    Phase.READY: {Transfer.NONE},
    Phase.RUNNING: {Transfer.NONE},
    Phase.HELD: {Transfer.NONE},
    Phase.DONE: set(Transfer),
}


def check_sequence(seq: Sequence) -> None:
    name = f"request {seq.id} is {seq.phase}"
    assert seq.transfer in TRANSFERS[seq.phase], f"{name} and its transfer is {seq.transfer}"
    bounds = f"{name}: {seq.num_computed} computed, {seq.num_reserved} reserved, {seq.capacity} fit"
    assert seq.num_computed <= seq.num_reserved, bounds
    if seq.inflight:
        assert seq.slot >= 0 and seq.pages, f"{name} and a launched step names it without slot or pages"
        return
    assert (seq.slot >= 0) == (seq.phase is Phase.RUNNING), f"{name} with slot {seq.slot}"
    assert not seq.pages or seq.phase not in (Phase.EXPECTED, Phase.WAITING), f"{name} with pages {seq.pages}"
    if seq.phase is Phase.DONE:
        assert seq.transfer is Transfer.READING, f"{name} and nothing keeps it"
    elif seq.phase is Phase.RUNNING:
        assert seq.num_reserved <= seq.capacity, bounds
        assert seq.num_reserved in (seq.num_computed, len(seq.tokens) - 1), f"{bounds}, no step is launched"
