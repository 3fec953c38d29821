"""Tokenizers of checkpoint folders: tiktoken's ranks give the ids that tiktoken's algorithm gives."""

import base64
import functools
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.tokenizer_file import MOONSHOT, byte_characters, load_tokenizer
from millrace_testing.paths import ROOT
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

WORDS = "中文测试,这是一个句子。 Hello WORLD it's CamelCaseX é ñ 12345\r\n\n  a  b\t"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8") + WORDS * 9
ADDED = {"1003": {"content": "<|im_end|>", "special": True}, "1005": {"content": "<think>", "special": False}}
CUT = regex.compile(MOONSHOT, regex.V1)  # V1: `&&` is an intersection


@functools.cache
def ranks() -> dict[bytes, int]:
    """256 bytes and 744 merges of the text's most frequent pairs."""
    known = {bytes([i]): i for i in range(256)}
    words = Counter(tuple(bytes([byte]) for byte in match.group().encode()) for match in CUT.finditer(TEXT))
    while len(known) < 1000:
        pairs = Counter[tuple[bytes, bytes]]()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        known[b"".join(best)] = len(known)
        words = Counter({merged(word, best): count for word, count in words.items()})
    return known


def merged(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    parts = list(word)
    while (at := next((i for i, two in enumerate(pairwise(parts)) if two == pair), None)) is not None:
        parts[at : at + 2] = [b"".join(pair)]
    return tuple(parts)


def by_rank(text: str) -> list[int]:
    """tiktoken's algorithm: merge the neighbours whose union has the lowest rank."""
    ids, known = [], ranks()
    for match in CUT.finditer(text):
        parts = [bytes([byte]) for byte in match.group().encode()]
        while options := [(known[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]:
            at = min(options)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [known[part] for part in parts]
    return ids


def write(folder: Path, known: dict[bytes, int], added: dict) -> None:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in known.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("ranks")
    write(folder, ranks(), ADDED)
    return load_tokenizer(folder)


def test_a_text_has_the_ids_of_tiktoken(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert ids == by_rank(TEXT) and len(ids) < len(TEXT) / 2
    assert tokenizer.decode(ids) == TEXT


@given(st.text(alphabet="aA'sé中 \n\r\t1.;-ÅǅʰÊ", max_size=30))
def test_any_text_has_the_ids_of_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).ids == by_rank(text)


def test_added_tokens_keep_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<|im_end|><think>b").ids == [97, 1003, 1005, 98]
    assert tokenizer.decode([97, 1003, 1005]) == "a<think>", "a special token has no text"
    assert tokenizer.token_to_id("<|reserved_token_1004|>") == 1004
    assert tokenizer.get_vocab_size() == 1006


@pytest.mark.parametrize(
    ("known", "added", "message"),
    [
        ({b"a": 0, b"b": 2}, {}, "2 ranks must be 0 to 1"),
        ({b"a": 0}, {"0": {"content": "<s>"}}, "added tokens must follow them"),
        ({b"a": 0}, {"1": {"text": "<s>"}}, r"tiktoken\.model: .*content"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, known: dict, added: dict, message: str) -> None:
    write(tmp_path, known, added)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== zero\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model: "):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_characters_of_bytes_are_those_of_byte_level_bpe() -> None:
    assert set(byte_characters()) == set(ByteLevel.alphabet()) and len(byte_characters()) == 256
    assert byte_characters()[ord(" ")] == "Ġ" and byte_characters()[ord("\n")] == "Ċ"
