from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.core import CachedTokens, Failure, FinishReason, RequestId, SequenceOutput, TokenOutput, Wait
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.links import MAX_TOKENS, LinkOutbox, RouterLink


def output(room: int, first_index: int, num_tokens: int, finish: FinishReason | None = None) -> SequenceOutput:
    tokens = [TokenOutput(first_index + i) for i in range(num_tokens)]
    return SequenceOutput(RequestId(room, 0), first_index, tokens, finish)


def test_router_that_keeps_up_gets_every_step_by_itself() -> None:
    box = LinkOutbox()
    for step in range(3):
        box.put(output(1, step, 1))
        box.put(output(2, step, 1))
        assert [(o.id.room, o.first_index) for o in box.take()] == [(1, step), (2, step)]
    assert not box


def test_refusal_of_what_no_request_may_be_goes_out() -> None:
    """Else it would end the router's link, and all of its requests."""
    box = LinkOutbox()
    box.put(output(0, 0, 0, FinishReason.ERROR))
    assert [entry.id.room for entry in box.take()] == [0] and not box._latest


def test_slow_router_gets_merged_outputs_with_the_end_last() -> None:
    first = SequenceOutput(RequestId(1, 0), 0, [TokenOutput(0)], found=CachedTokens(64), queued_s=0.5)
    error = Failure("STALLED", "late")
    end = SequenceOutput(first.id, 100, [], FinishReason.ERROR, error, num_drafted=90, num_accepted=40)
    box = LinkOutbox()
    box.put(first)
    for step in range(1, 100):
        box.put(output(1, step, 1))
    box.put(end)
    tokens = [TokenOutput(step) for step in range(100)]
    merged = SequenceOutput(first.id, 0, tokens, FinishReason.ERROR, error, first.found, 0.0, 90, 40)
    assert box.take() == [convert.wire_output(merged)]


def test_messages_stay_below_the_transport_limit() -> None:
    box = LinkOutbox()
    for start in range(0, 3 * MAX_TOKENS, 100):
        box.put(output(1, start, 100))
    sizes = []
    while box:
        sizes.append(sum(len(o.token_ids) for o in box.take()))
    assert sum(sizes) >= 3 * MAX_TOKENS and max(sizes) <= MAX_TOKENS


@given(st.lists(st.one_of(st.none(), st.integers(1, 3)), max_size=60))
def test_nothing_is_lost_or_reordered(events: list[int | None]) -> None:
    """None: the router takes a message; a number: that sequence says its next token."""
    box, said, heard = LinkOutbox(), {1: 0, 2: 0, 3: 0}, {1: [], 2: [], 3: []}

    def take() -> None:
        for o in box.take():
            assert o.first_index == len(heard[o.id.room])
            heard[o.id.room] += o.token_ids

    for event in events:
        if event is None:
            take()
        else:
            box.put(output(event, said[event], 1))
            said[event] += 1
            assert len(box) <= 3
    while box:
        take()
    assert {room: list(range(count)) for room, count in said.items()} == heard


async def test_router_gets_the_latest_word_about_each_wait_after_the_outputs() -> None:
    link, first, second = RouterLink("r"), RequestId(1, 0), RequestId(2, 0)
    link.tell(Wait(first))
    link.put(SequenceOutput(second, 0, [TokenOutput(7)]))
    link.tell(Wait(second))
    link.tell(Wait(first, over=True))
    message = await anext(link.messages())
    assert [out.id.room for out in message.outputs.outputs] == [2]
    assert {(wait.id.room, wait.over) for wait in message.outputs.waits} == {(1, True), (2, False)}
    link.end()
    assert [message async for message in link.messages()] == []
