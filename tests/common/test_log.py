"""The line format, the request id, and who may talk."""

import logging
import re
import sys
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from millrace_common import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
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
    assert line.endswith(": hello") and r"r-1]\n00:00" in line and line.isprintable() and len(line) < 250


HOSTILE = "\n\r\x00\x07\x1b\x7f\x85\xa0\xad\u200b\u2028\u2029\u202e\u2066\ufeff\ud800\U000e0041"


@given(st.text(st.characters() | st.sampled_from(HOSTILE)))
@example(HOSTILE)
def test_whatever_is_logged_is_one_line_that_can_be_printed(text: str) -> None:
    line = formatted(logging.makeLogRecord({"name": "a.b", "msg": "model %s", "args": (text,)}))
    assert line.isprintable() and len(line.splitlines()) == 1
    line.encode()


def test_what_can_be_printed_is_not_changed() -> None:
    assert formatted(logging.makeLogRecord({"name": "a.b", "msg": 'für 東京 🙂 C:\\new "x"'})).endswith(
        'a.b: für 東京 🙂 C:\\new "x"'
    )


def test_a_long_message_is_cut() -> None:
    line = formatted(logging.makeLogRecord({"name": "a.b", "msg": "x" * 100_000}))
    assert line.endswith("x... (100000 characters)") and len(line) < log.LONGEST + 100


def test_lines_of_a_traceback_and_of_a_table_stand_behind_a_margin() -> None:
    try:
        raise ValueError("bad\n00:00:00.000 I router a.b: all is well\x1b[2J")
    except ValueError:
        error = sys.exc_info()
    record = logging.makeLogRecord(
        {"name": "a.b", "msg": "failed", "exc_info": error, "lines": "weights 1 GiB\npages 2"}
    )
    first, *rest = formatted(record).splitlines()
    assert first.endswith("a.b: failed") and all(line.startswith(log.MARGIN) and line.isprintable() for line in rest)
    assert rest[:3] == [
        log.MARGIN + text for text in ("weights 1 GiB", "pages 2", "Traceback (most recent call last):")
    ]
    assert rest[-2:] == [log.MARGIN + "ValueError: bad", log.MARGIN + r"00:00:00.000 I router a.b: all is well\x1b[2J"]


def formatted(record: logging.LogRecord) -> str:
    return log.Formatter("router").format(record)


class Written(logging.Handler):
    """The texts of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(log.Formatter("router"))
        self.addFilter(log.Sparing())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).partition(": ")[2])

    def at(self, seconds: float, text: str, **facts: object) -> None:
        record = {"name": "millrace_rpc.server", "msg": text, "created": seconds, "pathname": "a.py", "lineno": 1}
        self.handle(logging.makeLogRecord({**record, **facts}))


BY_CLIENTS = [log.PER_REQUEST, *({"name": f"{name}.x"} for name in log.OF_CONNECTIONS)]


@pytest.mark.parametrize("facts", BY_CLIENTS)
def test_what_clients_cause_is_written_once_a_second_with_a_count(facts: dict[str, object]) -> None:
    written = Written()
    for i in range(1000):
        written.at(100 + i / 2000, f"bad {i}", **facts)
        written.at(100 + i / 2000, f"worse {i}", **facts, lineno=2)
    assert written.lines == ["bad 0", "worse 0"]
    written.at(101, "bad again", **facts)
    written.at(103, "bad later", **facts)
    assert written.lines[2:] == ["bad again (999 more were not logged)", "bad later"]


def test_a_clock_that_is_set_back_silences_nothing() -> None:
    written = Written()
    for seconds in (100, 50, 50.5, 51):
        written.at(seconds, f"at {seconds}", **log.PER_REQUEST)
    assert written.lines == ["at 100", "at 50", "at 51 (1 more were not logged)"]


def test_errors_of_two_kinds_from_one_place_are_both_written() -> None:
    written = Written()
    for kind in (ValueError, OSError, ValueError):
        written.at(100, kind.__name__, **log.PER_REQUEST, exc_info=(kind, kind(), None))
    assert [line.partition("\n")[0] for line in written.lines] == ["ValueError", "OSError"]


def test_a_fault_that_is_survived_is_logged_where_it_happened(caplog: pytest.LogCaptureFixture) -> None:
    with log.survived(logging.getLogger("x"), "%s broke", "it"):
        raise KeyError
    (record,) = caplog.records
    assert record.getMessage() == "it broke" and record.exc_info and record.pathname == __file__


def test_all_of_a_request_is_sparing_and_the_rest_is_not() -> None:
    written = Written()
    token = log.request_id.set("r-1")
    for i in range(3):
        written.at(100, f"in a request {i}")
    log.request_id.reset(token)
    for i in range(3):
        written.at(100, f"discovered {i}")
    assert written.lines == ["in a request 0", *(f"discovered {i}" for i in range(3))]


def test_what_is_warned_of_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logging.captureWarnings(False)
    log.setup("router")
    warnings.showwarning("odd\x1b[2J", UserWarning, "a.py", 1)  # pytest keeps what `warn` would show
    (line,) = capsys.readouterr().err.splitlines()
    assert " W router py.warnings: " in line and line.isprintable() and r"odd\x1b[2J" in line


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
