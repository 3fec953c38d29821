"""Answers of a checkpoint end at every token that its files name as an end."""

import json
from pathlib import Path

import pytest
import torch
from engine.harness import request, said
from millrace_serve.engine.config import Limits, Role
from millrace_serve.engine.core import FinishReason, Grammar, GrammarKind, Submit
from millrace_serve.engine.start.torch_factory import Rank, load_rank
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY
from tokenizers import Tokenizer

LIMITS = Limits(num_pages=16, max_model_len=64, max_running=2, max_prefill_tokens=64)
PROMPT = [20 + 7 * i % 400 for i in range(20)]
EOS, OTHER = 1, 4  # special tokens


def rank(folder: Path, **files: object) -> Rank:
    """models/tiny with other contents of these JSON files."""
    folder.mkdir(exist_ok=True)
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    for name, content in files.items():
        file = folder / f"{name}.json"
        file.unlink()
        file.write_text(json.dumps(content))
    return load_rank(LIMITS, Role.UNIFIED, folder, ParallelDims(), torch.device("cpu"), torch.float32)


def answer(one: Rank, *, ignore_eos: bool) -> list[int]:
    (tokens,) = said(one.engine(), [request(1, PROMPT, max_tokens=8, ignore_eos=ignore_eos)]).values()
    return [token for token, _ in tokens]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the model says where nothing ends it; its third token is made an end."""
    return answer(rank(tmp_path_factory.mktemp("own") / "model"), ignore_eos=True)


def test_end_that_generation_config_alone_names_ends_an_answer(whole: list[int], tmp_path: Path) -> None:
    end = whole[2]
    other = rank(tmp_path / "other", generation_config={"eos_token_id": [EOS, end]})
    assert answer(other, ignore_eos=False) == whole[: whole.index(end) + 1]
    assert other.load is not None and other.load(TINY, True) == "", "a trainer's folder need not name it again"
    own = rank(tmp_path / "plain")
    with pytest.raises(ValueError, match=rf"eos_token_ids=.*{end}.*, not "):
        assert own.load is not None and own.load(tmp_path / "other", True)


def test_end_of_a_turn_that_only_its_name_tells_ends_an_answer(whole: list[int], tmp_path: Path) -> None:
    end = whole[2]
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(end): {"content": "<|im_end|>", "special": True}}
    assert answer(rank(tmp_path / "other", tokenizer_config=config), ignore_eos=False) == whole[: whole.index(end) + 1]


def test_grammar_allows_every_end_behind_its_complete_text_only(tmp_path: Path) -> None:
    engine = rank(tmp_path, generation_config={"eos_token_id": OTHER}).engine()
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for end in (EOS, OTHER):
        options = {"grammar": Grammar(GrammarKind.REGEX, "ab"), "logit_bias": {end: 100.0}, "ignore_eos": False}
        engine.submit(Submit(request(end, PROMPT, max_tokens=8, **options)))
        tokens, finish = [], None
        while finish is None:  # the grammar is compiled beside the loop
            for output in engine.step().outputs:
                tokens += [token.token_id for token in output.tokens]
                finish = output.finish
        assert finish is FinishReason.STOP, output.error
        assert tokens[-1] == end and tokenizer.decode(tokens[:-1]) == "ab"
    engine.close()
