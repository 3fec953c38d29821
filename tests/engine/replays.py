"""The graphs of an engine against the calls that they were captured from."""

import torch
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.step.device import Replay
from millrace_serve.engine.step.graphs import Key
from torch import Tensor


@torch.inference_mode()
def check_replays(one: Engine) -> None:
    """Both graphs of each key leave the same bits as the calls. The last sequence of a bucket is padding, whose results
    may be any.
    """
    graphs = one._runner._graphs
    for key, (forward, accept) in graphs._replays.items():
        for position in range(3):
            replayed = _results(one, key, position, forward, accept)
            called = _results(one, key, position, graphs._body(key), accept and graphs._acceptance(key, graphs._accept))
            for name, values in replayed.items():
                assert torch.equal(values, called[name]), (key, position, name)
            rows = replayed["logits"]
            assert len(rows.unique(dim=0)) == len(rows), "rows with different tokens differ"
            if accept is not None:
                assert (replayed["counts"][::2] == key.num_queries).all()
                assert (replayed["last_tokens"][:, : key.num_queries] >= 0).all(), "there are new drafts"


def _results(one: Engine, key: Key, position: int, forward: Replay, accept: Replay | None) -> dict[str, Tensor]:
    """What the sequences of a step with so many tokens in their pages get. Every second one's drafts are right."""
    graphs, state, q = one._runner._graphs, one._runner.slots, key.num_queries
    count = max(key.bucket - 1, 1)
    _fill(one, key, count, position)
    forward()
    logits = graphs._results["logits"][: count * q].clone()
    if accept is None:
        return {"logits": logits}
    tokens = logits.argmax(-1).view(count, q)
    tokens[::2, :-1] = state.last_tokens[:count:2, 1:q]
    graphs._tokens[: count * q].copy_(tokens.flatten())
    accept()
    accepted = state.accepted(count)
    left = {name: getattr(accepted, name).clone() for name in ("counts", "drafted", "rows")}
    left |= {name: getattr(state, name)[:count].clone() for name in ("last_tokens", "lengths")}
    return {"logits": logits, **left}


def _fill(one: Engine, key: Key, count: int, position: int) -> None:
    """The state of `count` slots with a page each, and of nothing else what an earlier run has left."""
    state, graphs = one._runner.slots, one._runner._graphs
    slots, places = torch.arange(count), torch.arange(state.last_tokens.shape[1])
    state.last_tokens[:count] = (10 + position + 7 * slots[:, None] + places).to(state.last_tokens.device)
    state.page_table[:count, 0] = 1 + slots.to(state.page_table)  # page 0 is the null page
    state.lengths[:count], state.capacity[:count] = position, state.page_size
    graphs._slots[: key.bucket] = state.padding
    graphs._slots[:count] = slots.to(graphs._slots)
    graphs._num_rows.fill_(count * key.num_queries)
    for result in graphs._results.values():
        result.fill_(-1)
