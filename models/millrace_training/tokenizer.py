"""Byte-level BPE over the training text and the generated tasks, with DeepSeek's special tokens and chat format.

python -m millrace_training.tokenizer DATA_DIR OUT_DIR
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from millrace_bench.tasks import ADJECTIVES, NAMES, NOUNS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from millrace_training.config import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, USER, ModelConfig
from millrace_training.small_talk import known_turn

TEXT_CHARS = 12_000_000
WORD_REPEATS = 12_000  # makes each task word after a space one token
TALK_TURNS = 20_000

# The system text comes first; a user turn opens with its mark, an assistant turn ends with the end token.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages if m['role'] == 'system' %}{{ ('' if loop.first else '\\n\\n') + m['content'] }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '" + USER + "' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '" + ASSISTANT + "' + (m['content'] or '') + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def train(data_dir: Path, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(data_dir), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def _lines(data_dir: Path) -> Iterator[str]:
    chars, rng = 0, Random(0)
    with (data_dir / "train.jsonl").open() as file:
        documents = [json.loads(line)["text"] for line in file]
    rng.shuffle(documents)
    for document in documents:
        if chars > TEXT_CHARS:
            break
        chars += len(document)
        yield from document.splitlines(keepends=True)
    yield from (f" {word}" * WORD_REPEATS for word in ADJECTIVES + NOUNS)
    yield from (f" {word}" * (WORD_REPEATS // 10) for word in NAMES)
    for _ in range(TALK_TURNS):
        yield from known_turn(rng)


def write(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json"""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer.")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = ModelConfig()
    write(train(args.data, config.vocab_size), args.out, config.max_position_embeddings)


if __name__ == "__main__":
    main()
