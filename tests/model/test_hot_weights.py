"""Other weights in the places of those of a model that runs: nothing of the old ones is left, and no tensor moves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from millrace_serve.model.checkpoint.checkpoint_hash import checkpoint_hash
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model, open_checkpoint
from millrace_serve.model.held_weights import named_weights, overwrite
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import tensors
from millrace_serve.model.weights import CheckpointError
from millrace_testing.other_weights import write_other
from model.checkpoints import InForm, Tensors, variant
from model.harness import Driver, Seq, random_prompt
from torch import Tensor

CPU = torch.device("cpu")
FORMS = ("", "fp8", "int8", "int8-block", "int4")


def load(path: Path, *, quantised: bool) -> DeepseekV3:
    return load_model(path, ParallelDims(), CPU, torch.float32, keep_quantised=quantised)


def reload(model: DeepseekV3, path: Path, *, quantised: bool) -> None:
    with open_checkpoint(path, CPU, torch.float32, keep_quantised=quantised) as (ckpt, _):
        model.load(ckpt)


def logits(model: DeepseekV3) -> Tensor:
    """Of prompts and of the MTP layer's drafts: both forms of attention, dense layers and experts."""
    driver = Driver(model)
    long, short = (Seq(random_prompt(length, 1000, seed=length)) for length in (200, 5))
    return torch.cat([driver.step([(long, 150), (short, 4)]), driver.step([(long, 50), (short, 1)])])


def places(value: Any, seen: set[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Address and shape of every tensor below an object."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value.data_ptr(), tuple(value.shape)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from places(item, seen)
    elif type(value).__module__.startswith("millrace_serve.model") and hasattr(value, "__dict__"):
        for name in sorted(vars(value)):
            yield from places(vars(value)[name], seen)


def where(model: DeepseekV3) -> list[tuple[int, tuple[int, ...]]]:
    parts = (model.embed_tokens, model.layers, model.norm, model.lm_head, model.mtp)
    return list(places(parts, set()))


@pytest.fixture(scope="module")
def other(random_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another training step."""
    return write_other(tmp_path_factory.mktemp("hot") / "other", seed=5, source=random_bf16)


@pytest.mark.parametrize("form", FORMS)
def test_model_with_other_weights_is_one_that_was_loaded_so(
    form: str, random_bf16: Path, other: Path, in_form: InForm
) -> None:
    folders, quantised = [in_form(source, form) for source in (random_bf16, other)], bool(form)
    model, second = (load(folder, quantised=quantised) for folder in folders)
    fresh, before = [logits(model), logits(second)], where(model)
    assert not torch.allclose(*fresh, atol=0.1) and len(before) > 50
    reload(model, folders[1], quantised=quantised)
    assert torch.equal(logits(model), fresh[1])
    assert where(model) == before


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_of_the_model_is_a_weight_by_name(form: str, random_bf16: Path, in_form: InForm) -> None:
    """So that a load leaves none of the old ones."""
    model = load(in_form(random_bf16, form), quantised=bool(form))
    found = {tensor.data_ptr() for _, matrix in named_weights(model, "model") for tensor in tensors(matrix)}
    assert {place for place, shape in where(model) if 0 not in shape} <= found


def test_a_part_that_names_no_weights_is_an_error() -> None:
    with pytest.raises(AttributeError, match="WEIGHTS"):
        overwrite([torch.zeros(1), object()], [torch.ones(1), object()], "part")  # type: ignore[list-item]  # the error


def test_weights_in_another_form_are_refused_by_name(random_fp8: Path, tmp_path: Path) -> None:
    """Also where the configuration says nothing of it: one matrix is not quantised."""
    name = "model.layers.0.self_attn.o_proj.weight"

    def widen(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.bfloat16)
        del tensors[f"{name}_scale_inv"]

    mixed = variant(random_fp8, tmp_path / "mixed", widen)
    with pytest.raises(CheckpointError, match=r"DecoderLayer.self_attn.o_proj is stored in another form"):
        reload(load(random_fp8, quantised=True), mixed, quantised=True)


def test_failed_load_is_mended_by_the_next_one(random_bf16: Path, other: Path, tmp_path: Path) -> None:
    cut = variant(other, tmp_path / "cut", lambda tensors: tensors.pop("lm_head.weight"))
    expected = logits(load(other, quantised=False))
    model = load(random_bf16, quantised=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        reload(model, cut, quantised=False)
    reload(model, other, quantised=False)
    assert torch.equal(logits(model), expected)


def test_another_training_step_has_another_hash(random_bf16: Path, other: Path) -> None:
    assert checkpoint_hash(other) != checkpoint_hash(random_bf16)
