"""The tokenizer of a checkpoint folder: tokenizer.json, or tiktoken's ranks as Moonshot AI publishes them (Moonlight,
Kimi K2), which become the same byte-level BPE.
"""

import base64
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from millrace_common.model_files import check_file, read_object

HUGGING_FACE, TIKTOKEN = "tokenizer.json", "tiktoken.model"
CONFIG = "tokenizer_config.json"

# How Moonshot's tokenizers cut a text before BPE: a run of Han characters stands alone, words end at a change to upper
# case and keep a contraction, and numbers have at most three digits.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
MOONSHOT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ValueError, with the file's name, when there is none that can be used."""
    if (file := folder / TIKTOKEN).exists() and not (folder / HUGGING_FACE).exists():
        check_file(file)
        config = read_object(folder / CONFIG)
        try:
            ranks = dict(_ranks(file.read_bytes()))
            added = {
                int(i): AddedToken(token["content"], special=bool(token.get("special")))
                for i, token in config.get("added_tokens_decoder", {}).items()
            }
            return from_ranks(ranks, added)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{file}: {error}") from error
    check_file(folder / HUGGING_FACE)
    try:
        return Tokenizer.from_file(str(folder / HUGGING_FACE))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{folder / HUGGING_FACE}: {error}") from error


def from_ranks(ranks: Mapping[bytes, int], added: Mapping[int, AddedToken]) -> Tokenizer:
    """BPE that always merges the pair with the lowest rank. `added` tokens, by id, follow the ranks; ids between them
    are reserved.
    """
    text = {data: "".join(byte_characters()[byte] for byte in data) for data in ranks}
    merges = [(text[left], text[right]) for left, right in _merges(ranks)]
    vocab = {text[data]: rank for data, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(MOONSHOT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    first = len(vocab)
    if sorted(vocab.values()) != list(range(first)) or min(added, default=first) < first:
        raise ValueError(f"{first} ranks must be 0 to {first - 1}, and added tokens must follow them")
    reserved = (AddedToken(f"<|reserved_token_{i}|>", special=True) for i in range(first, max(added, default=-1) + 1))
    tokenizer.add_tokens([added.get(i, token) for i, token in enumerate(reserved, first)])
    return tokenizer


@functools.cache
def byte_characters() -> str:
    """The character that stands for each byte in byte-level BPE: printable bytes of Latin-1 are themselves, the others
    are counted up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token id. A token is written with one printable character per byte (GPT-2's table); one with
    any other character, which only added tokens have, stands for itself.
    """
    alphabet = {character: byte for byte, character in enumerate(byte_characters())}
    table = [b""] * (max(tokenizer.get_vocab().values(), default=-1) + 1)
    for token, i in tokenizer.get_vocab().items():
        try:
            table[i] = bytes([alphabet[character] for character in token])
        except KeyError:
            table[i] = token.encode()
    return table


def _ranks(data: bytes) -> Iterator[tuple[bytes, int]]:
    for line in data.splitlines():
        if line:
            token, rank = line.split()
            yield base64.b64decode(token, validate=True), int(rank)


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs that make a token, in the order of their tokens."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
