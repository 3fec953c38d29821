"""The table of engine/schedule/sequence.py as assertions: what a sequence holds fits its phase."""

from millrace_serve.engine.schedule.sequence import KvWriter, Phase, Sequence

WRITERS = {
    Phase.EXPECTED: {KvWriter.AWAITED, KvWriter.OWN},
    Phase.WAITING: {KvWriter.OWN, KvWriter.AWAITED, KvWriter.FILLING},
    Phase.IMPORTING: {KvWriter.READING},
    Phase.READY: {KvWriter.OWN},
    Phase.RUNNING: {KvWriter.OWN, KvWriter.FILLING},
    Phase.HELD: {KvWriter.OWN, KvWriter.FILLING},
    Phase.DONE: set(KvWriter),
}


def check_sequence(seq: Sequence) -> None:
    name = f"request {seq.id} is {seq.phase}"
    assert seq.kv in WRITERS[seq.phase], f"{name} and its KV is written by {seq.kv}"
    bounds = f"{name}: {seq.num_computed} computed, {seq.num_reserved} reserved, {seq.capacity} fit"
    assert seq.num_computed <= seq.num_reserved, bounds
    if seq.inflight:
        assert seq.slot >= 0 and seq.pages, f"{name} and a launched step names it without slot or pages"
        return
    assert (seq.slot >= 0) == (seq.phase is Phase.RUNNING), f"{name} with slot {seq.slot}"
    assert not seq.pages or seq.phase not in (Phase.EXPECTED, Phase.WAITING), f"{name} with pages {seq.pages}"
    if seq.phase is Phase.DONE:
        assert seq.kv is KvWriter.READING, f"{name} and nothing keeps it"
    elif seq.phase is Phase.RUNNING:
        assert seq.num_reserved <= seq.capacity, bounds
        assert seq.num_reserved in (seq.num_computed, len(seq.tokens) - 1), f"{bounds}, no step is launched"
