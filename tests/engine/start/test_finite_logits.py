"""Logits with a NaN or an infinite number: a start names the layer, a request ends in an error of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine.harness import request
from millrace_common.reasons import Reason
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Request, RequestId, Route, SequenceOutput, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.checkpoint.tensor_file import TensorFile
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import INDEX_FILE, CheckpointError
from millrace_testing.paths import TINY
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
ODD = 777  # a token whose embedding is made a NaN
PLAIN, DRAFTS = {}, {"draft_tokens": 1}


def limits(**changes: object) -> Limits:
    base = {"num_pages": 40, "max_model_len": 512, "max_running": 8, "max_prefill_tokens": 96}
    return Limits.model_validate({**base, **changes})


def with_huge(folder: Path, name: str) -> Path:
    """A checkpoint with finite numbers in that tensor, whose products are not."""
    shutil.copytree(TINY, folder)
    file = folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = torch.full_like(tensors[name], 3e38)
    save_file(tensors, file)
    assert name in TensorFile(file).tensors
    return folder


@pytest.mark.parametrize(
    ("name", "says", "settings"),
    [
        ("model.layers.0.self_attn.o_proj.weight", "layer 0 is the first", PLAIN),
        ("model.layers.2.mlp.shared_experts.down_proj.weight", "layer 2 is the first", DRAFTS),
        ("lm_head.weight", "the outputs of all layers have none", PLAIN),
    ],
)
def test_start_with_huge_weights_names_the_first_layer(
    name: str, says: str, settings: dict[str, object], tmp_path: Path
) -> None:
    folder = with_huge(tmp_path / "model", name)
    with pytest.raises(CheckpointError, match=f"the model's logits have a NaN or an infinite number .*: {says}"):
        load_rank(limits(**settings), Role.UNIFIED, folder, ParallelDims(), CPU, torch.float32)


def engine(model: DeepseekV3, role: Role = Role.UNIFIED, graphs: str = "off", **changes: object) -> Engine:
    execution = Execution.model_validate({"graphs": graphs})
    rank = load_rank(limits(**changes), role, TINY, ParallelDims(), CPU, torch.float32, execution, model=model)
    return rank.engine()


def ends(one: Engine, batch: list[Request]) -> dict[RequestId, list[SequenceOutput]]:
    """Every output by request, until the engine has nothing left."""
    found: dict[RequestId, list[SequenceOutput]] = {each.id: [] for each in batch}
    for each in batch:
        one.submit(Submit(each))
    while one.has_work():
        for output in one.step().outputs:
            found[output.id].append(output)
    one.check_idle()
    return found


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 3}


@pytest.mark.parametrize(("graphs", "settings", "sampling"), [("off", PLAIN, {}), ("on", DRAFTS, SAMPLED)])
def test_nan_of_one_request_leaves_its_neighbours_their_tokens(
    graphs: str, settings: dict[str, object], sampling: dict[str, object]
) -> None:
    """It fails in each place: at the first token of a short and of a long prompt, and in the middle of its outputs."""
    model = load_model(TINY, ParallelDims(), CPU, torch.float32, mtp=bool(settings))
    one = engine(model, graphs=graphs, **settings)
    good = [request(room, [20 + room + i for i in range(40 * room)], **sampling) for room in (1, 2, 3)]
    expected = {id: tokens(outputs) for id, outputs in ends(one, good).items()}
    prompt = [*range(100, 180)]
    alone = tokens(ends(one, [request(9, prompt, **sampling)])[RequestId(9, 0)])
    bad = [request(11, [5, ODD], **sampling), request(12, [*range(200, 300), ODD, *range(100)], **sampling)]
    weight = model.embed_tokens.weight
    saved = weight.clone()
    weight[ODD] = torch.nan
    weight[alone[2]] = torch.nan  # what it gives it gets back
    healthy = [each for each in good if alone[2] not in (*each.token_ids, *expected[each.id])]
    assert healthy and alone[2] not in (*prompt, *alone[:2])
    late = request(13, prompt, **sampling)
    found = ends(one, [*healthy, *bad, late])
    for each in healthy:
        assert tokens(found[each.id]) == expected[each.id]
    for each in (*bad, late):
        error = found[each.id][-1].error
        assert error is not None and error.reason == Reason.NOT_FINITE and "NaN" in error.message
        assert tokens(found[each.id]) == (alone[:3] if each is late else [])
    weight.copy_(saved)
    again = ends(one, [request(14, [*bad[1].token_ids], **sampling), request(15, prompt, **sampling)])
    assert tokens(again[RequestId(15, 0)]) == alone  # and no page with a NaN was kept
    assert not again[RequestId(14, 0)][-1].error
    one.close()


@pytest.mark.parametrize(("role", "route"), [(Role.UNIFIED, Route.LOCAL), (Role.PREFILL, Route.EXPORT)])
def test_infinite_logit_fails_its_request(role: Role, route: Route) -> None:
    model = load_model(TINY, ParallelDims(), CPU, torch.float32, mtp=False)
    one = engine(model, role)
    model.lm_head.weight[3] = torch.inf
    [output] = ends(one, [request(1, [5, 6, 7], route)])[RequestId(1, 0)]
    assert output.error is not None and output.error.reason == Reason.NOT_FINITE and not output.tokens
    one.close()
