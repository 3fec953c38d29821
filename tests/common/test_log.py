"""The line format, the request id, and who may talk."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from millrace_common import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_line_names_process_module_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("decode/rank0")
    token = log.request_id.set("abc")
    logging.getLogger("millrace_serve.x").info("kv fetched pages=%d", 3)
    log.request_id.reset(token)
    logging.getLogger("millrace_serve.x").warning("idle")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} I decode/rank0 millrace_serve\.x \[abc\]: kv fetched pages=3", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} W decode/rank0 millrace_serve\.x: idle", second)


def test_a_clients_id_makes_no_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("router", "INFO")
    token = log.request_id.set("r-1]\n00:00:00.000 I router: all is well\x1b[2J" + "x" * 1000)
    try:
        logging.getLogger("a.b").info("hello")
    finally:
        log.request_id.reset(token)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": hello") and "r-1]?00:00" in line and line.isprintable() and len(line) < 250


def test_setup_twice_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a")
    log.setup("b")
    logging.getLogger("x").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_level_and_noisy_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "debug")
    logging.getLogger("millrace_rpc").debug("ours")
    logging.getLogger("asyncio").debug("theirs")
    log.setup("a", "error")
    logging.getLogger("millrace_rpc").warning("too low")
    assert capsys.readouterr().err.rstrip().endswith("ours")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        log.setup("a", "loud")
