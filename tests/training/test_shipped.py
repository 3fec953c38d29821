"""The shipped checkpoint: its size, its tokenizer, a few of its answers, and the numbers on its card."""

import json
from random import Random

import pytest
import torch
from millrace_bench import tasks
from millrace_bench.tasks import COPY_WORDS, RETRIEVAL_LINES, TASKS, TOKENS_PER_LINE, Turn, Verdict, judge, retrieval
from millrace_testing.paths import TINY
from millrace_training.batches import ChatEncoder
from millrace_training.config import BOS_ID, EOS_ID, ModelConfig
from millrace_training.evaluate import SEED, TARGETS, Evaluator, greedy, table
from millrace_training.recipe import Recipe
from tokenizers import Tokenizer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(TINY, "cpu")


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((TINY.parent / "evaluation.json").read_text("utf-8"))


def test_size_and_config():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 12_000_000
    published = json.loads((TINY / "config.json").read_text("utf-8"))
    assert ModelConfig.from_published(published) == ModelConfig()
    assert published == ModelConfig().published()
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "max_position_embeddings")
    assert [published[size] for size in sizes] == [512, 64, 128, 128, 4096]


def test_task_words_are_single_tokens():
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for word in tasks.WORDS:
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1, word
    assert tokenizer.encode("1234", add_special_tokens=False).tokens == list("1234")


@pytest.mark.parametrize(("name", "tokens"), [("retrieval_1k", 1024), ("retrieval_2k", 2048), ("retrieval_4k", 4096)])
def test_retrieval_contexts_are_as_long_as_their_name_says(evaluator, name, tokens):
    (item,) = TASKS[name].items(0, 1)
    length = len(evaluator.prompt(item))
    assert 0.98 * tokens < length <= tokens - item.max_tokens
    assert length - RETRIEVAL_LINES[name] * TOKENS_PER_LINE < 30


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two  spaces\n\ttab", "größer als 水車 🌊👨‍👩‍👧", "\x00\x7f", "zzzzqqqq 9876543210"]
)
def test_tokenizer_round_trips_any_text(text):
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS_ID
    assert tokenizer.decode(ids) == text


def test_copy_is_of_64_tokens(evaluator):
    (item,) = TASKS["copy"].items(0, 1)
    assert len(evaluator.tokenizer.encode(f" {item.answer}", add_special_tokens=False).ids) == COPY_WORDS


def test_chat_template_renders_what_training_saw():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is 123 + 456?"},
        {"role": "assistant", "content": "579"},
        {"role": "user", "content": "Hi - blue fox: 731"},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = tokenizer(rendered, add_special_tokens=False).input_ids
    chat = ChatEncoder(Tokenizer.from_file(str(TINY / "tokenizer.json")))
    wanted, _ = chat([Turn("What is 123 + 456?", "579"), Turn("Hi - blue fox: 731", "")], "Answer briefly.")
    assert found == wanted[:-1]
    assert tokenizer.decode(found[5:], skip_special_tokens=False) in rendered


@pytest.mark.parametrize("name", ["addition", "chat"])
def test_it_answers(evaluator, name):
    result = evaluator.task(TASKS[name], 4)
    assert result["correct"] == 4
    assert result["acceptance"] > 0.7


@pytest.mark.parametrize("name", ["copy", "sort"])
def test_it_gives_long_answers(evaluator, name):
    """One forward over a right answer: each of its tokens is the likeliest one, so it is what greedy decoding gives."""
    items = TASKS[name].items(SEED, 4)
    prompts, outputs = [evaluator.prompt(item) for item in items], []
    for item, prompt in zip(items, prompts, strict=True):
        (question,) = item.messages
        whole = evaluator.chat([Turn(question.content, item.answer)])[0]
        with torch.no_grad():
            likeliest = evaluator.model.lm_head(evaluator.model.hidden(torch.tensor([whole[:-1]])))[0].argmax(-1)
        outputs.append(whole[len(prompt) :])
        assert whole[: len(prompt)] == prompt and whole[-1] == EOS_ID
        assert likeliest[len(prompt) - 1 :].tolist() == outputs[-1]
        assert judge(item, evaluator.tokenizer.decode(outputs[-1])) is Verdict.CORRECT
    assert evaluator.acceptance(prompts, outputs)["acceptance"] > 0.7


def test_it_retrieves_and_stops(evaluator):
    turns = retrieval(Random(5), num_lines=40).turns
    prompt = evaluator.chat([Turn(turns[0].user, "")])[0][:-1]
    (output,) = greedy(evaluator.model, [prompt], 8, "cpu")
    assert evaluator.tokenizer.decode(output) == turns[0].answer
    assert output[-1] == EOS_ID


def test_card_shows_the_measured_numbers(results):
    card = (TINY.parent / "README.md").read_text("utf-8")
    assert table(results) in card
    assert f"{results['text']['perplexity']:.2f}" in card
    assert f"{Recipe().steps:,} steps" in card


def test_targets_are_met(results):
    measured = {name: task["accuracy"] for name, task in results["tasks"].items()}
    measured["mtp"] = results["mtp"]["acceptance"]
    assert set(results["tasks"]) == set(TASKS)
    assert {name: measured[name] for name, target in TARGETS.items() if measured[name] < target} == {}


def test_acceptance_counts_one_draft_for_each_token_but_the_first(evaluator):
    (item,) = TASKS["addition"].items(0, 1)
    prompt = evaluator.prompt(item)
    (output,) = greedy(evaluator.model, [prompt], 8, "cpu")
    assert judge(item, evaluator.tokenizer.decode(output)) is Verdict.CORRECT
    numbers = evaluator.acceptance([prompt], [output])
    sequence = torch.tensor([prompt + output])
    with torch.no_grad():
        drafts = evaluator.model(sequence)[1].argmax(-1)[0]
    right = [int(drafts[i - 2]) == token for i, token in enumerate(prompt + output)][len(prompt) + 1 :]
    assert (numbers["accepted"], numbers["drafted"]) == (sum(right), len(output) - 1)
