from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_router.text.markers import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[str, str]:
    """Character by character: the first moment at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def run(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


letters = st.text("ab", max_size=12)


@settings(max_examples=500)
@given(st.lists(letters, max_size=8), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_equals_naive_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == naive("".join(pieces), stops)
    assert run(list("".join(pieces)), stops) == naive("".join(pieces), stops)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_is_shown_that_a_stop_string_takes_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for character in text:
        shown += matcher.push(character)
        assert naive(text, stops)[0].startswith(shown)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_withheld_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    held = text[len(shown) :] if not matcher.matched else ""
    assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("hello\n\nUser: x", ["\n\nUser:"], "hello"),
        ("abcd", ["bc", "abcd"], "a"),  # "bc" is complete first
        ("xabc", ["c", "abc"], "x"),  # both end here: the longer
        ("aaab", ["aab"], "a"),
        ("日本語です", ["語で"], "日本"),
        ("no stop", ["zzz"], "no stop"),
    ],
)
def test_examples(text: str, stops: list[str], shown: str) -> None:
    assert run(list(text), stops)[0] == shown
