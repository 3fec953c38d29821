"""This replica's rows of a prompt chunk that all replicas compute together."""

from dataclasses import replace

import torch
from torch import Tensor

from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.slots import Slots
from millrace_serve.model.inputs import ContextParallelRows, ForwardInput
from millrace_serve.model.parallel import ParallelDims


def with_shared(inputs: ForwardInput, step: StepBatch[Tensor], slots: Slots, dims: ParallelDims) -> ForwardInput:
    """`inputs` of the step's other rows, and those of its shared chunk behind them. Collective over dp.

    The owner's slot then counts the whole chunk, whose KV the step writes.
    """
    shared = step.shared
    assert shared is not None
    split, device = shared.split, inputs.device
    tokens = shared.tokens if split.mine else shared.tokens.new_empty(split.num_tokens + 1)
    tokens = dims.dp_broadcast(tokens, split.owner)
    mine = torch.cat([torch.arange(*block, device=device) for block in split.blocks(split.me)])
    table = slots.page_table[:, : step.num_pages].index_select(0, shared.slots)
    positions = torch.arange(split.start, split.end if split.mine else split.start, device=device)
    pages = table[:, positions // slots.page_size].flatten().long()
    slots.lengths.index_fill_(0, shared.slots, split.end)
    return replace(
        inputs,
        token_ids=torch.cat((inputs.token_ids, tokens[mine])),
        positions=torch.cat((inputs.positions, split.start + mine)),
        kv_slots=torch.cat((inputs.kv_slots, torch.zeros_like(mine))),  # the owner stores all rows of the chunk at once
        shared=ContextParallelRows(
            split, dims, tokens[mine + 1], pages * slots.page_size + positions % slots.page_size, table
        ),
    )
