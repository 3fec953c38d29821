from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_common.config import ConfigError
from millrace_common.reasons import Reason
from millrace_router.flow.stream import AnswerText
from millrace_router.text.message import MessageParser, Said
from millrace_router.text.tokenizer import LONG_TEXT, Tokenizer
from millrace_rpc.errors import MillraceError
from router.harness import BOS, EOS, USER, write_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> HfTokenizer:
    return HfTokenizer.from_file(str(model_folder / "tokenizer.json"))


async def test_text_gets_the_first_token_and_chat_the_templates(tokenizer: Tokenizer) -> None:
    assert (await tokenizer.encode("hello", add_bos=True))[0] == tokenizer.bos
    text = tokenizer.render([{"role": "user", "content": "hello"}])
    assert text == f"{BOS}{USER}hello"
    ids = await tokenizer.encode(text, add_bos=False)
    assert ids[0] == tokenizer.bos and ids.count(tokenizer.bos) == 1
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, keep_special=True) == text


async def test_long_texts_are_encoded_the_same(tokenizer: Tokenizer) -> None:
    text = "hello " * LONG_TEXT
    assert tokenizer.decode(await tokenizer.encode(text, add_bos=True)) == text


@settings(max_examples=200)
@given(st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer._encode(text, add_bos=True)
    assert tokenizer.decode(ids, keep_special=True) == BOS + text


@settings(max_examples=300)
@given(st.lists(st.integers(0, 260), max_size=30), st.booleans(), st.integers(1, 5))
def test_incremental_equals_whole_for_any_ids(
    tokenizer: Tokenizer, reference: HfTokenizer, ids: list[int], keep: bool, piece: int
) -> None:
    """Also for bytes that are no UTF-8: the tokenizers library's own answer, whatever the pieces."""
    stream = AnswerText(tokenizer, MessageParser.of_plain_text(), keep_special=keep)
    text = "".join(stream.push(ids[i : i + piece])[0].text for i in range(0, len(ids), piece)) + stream.flush().text
    assert text == tokenizer.decode(ids, keep) == reference.decode(ids, skip_special_tokens=not keep)


def test_a_character_appears_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    ids, stream = tokenizer._encode("é🚀", add_bos=False), AnswerText(tokenizer, MessageParser.of_plain_text())
    assert [stream.push([i])[0].text for i in ids] == ["", "é", "", "", "", "🚀"]
    assert stream.push(ids[:1]) == (Said(), 1) and stream.flush().text == "\ufffd"


def test_ids_beyond_the_tokenizer_are_silent(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([64, 999_999, 65]) == "ab"


def test_stop_string_over_token_boundaries_and_inside_characters(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, MessageParser.of_plain_text(), ["🚀b"])
    ids = tokenizer._encode("aé🚀bcd", add_bos=False)
    said, used = text.push(ids)
    assert said.text == "aé" and text.stopped_by and tokenizer.decode(ids[:used]) == "aé🚀b"


def test_template_that_refuses(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('first the user') }}{% endif %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template))
    with pytest.raises(MillraceError, match="first the user") as caught:
        tokenizer.render([{"role": "system", "content": "x"}])
    assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.param == "messages"


@pytest.mark.parametrize("attack", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_template_is_sandboxed(tmp_path: Path, attack: str) -> None:
    with pytest.raises(ConfigError, match="the chat template cannot be used"):
        Tokenizer.load(write_tokenizer(tmp_path, attack))


def test_unusable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="template cannot be used"):
        Tokenizer.load(write_tokenizer(tmp_path, "{% if %}"))
    write_tokenizer(tmp_path)
    other = HfTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    other.decoder = decoders.Fuse()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="Fuse"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "no usable tokenizer"),
        ({"chat_template": [{"name": "default", "template": "x"}]}, "the chat template is no text but list"),
        ({"bos_token": 1}, "a token that is no text: 1"),
        ({"eos_token": {"content": []}}, "a token that is no text"),
    ],
)
def test_malformed_configurations_of_tokenizers(config: object, words: str, tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"no usable tokenizer: .* can't decode"):
        Tokenizer.load(tmp_path)


def test_no_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos is None
    with pytest.raises(MillraceError, match="no chat template"):
        tokenizer.render([])
