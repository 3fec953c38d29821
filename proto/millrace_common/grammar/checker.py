"""Compiles grammars in processes of their own, which end at their limits of time and memory and when nobody waits.

llguidance counts what it does, but for some texts of a few KB its counts allow minutes and gigabytes. What compiles
here within the limits compiles in about the same time elsewhere.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from millrace_common.grammar.child import CPU_S
from millrace_common.grammar.source import GrammarError

MEMORY = 512 << 20  # bytes of address space
WAIT_S = 30.0  # for the answer of a process that gets no time of the CPU
_START = "import sys; sys.path.insert(0, sys.argv[1]); from millrace_common.grammar import child; child.main()"
# How a process ends that needs more than it may have: by Python, time, an allocation, the stack.
OVER_LIMIT = (0, -signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
POLL_S = 0.05  # between two looks whether anybody still waits


class NobodyWaits(Exception):
    """The job was given up."""


class CompilerStarved(Exception):
    """The process got too little time of the CPU to answer, or was ended. It says nothing of the grammar."""


class Checker:
    """Thread-safe. A process starts with its first job."""

    def __init__(self, processes: int) -> None:
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children = [_Child() for _ in range(processes)]
        for child in self._children:
            self._idle.put(child)

    def check(self, kind: str, text: str, given_up: threading.Event) -> str:
        """The grammar as llguidance's, which is known to compile. Raises GrammarError, NobodyWaits,
        CompilerStarved.
        """
        child = self._idle.get()
        try:
            if given_up.is_set():
                raise NobodyWaits
            return child.ask(kind, text, given_up)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        for child in self._children:
            child.kill()


class _Child:
    """Used by one thread at a time; `kill` by any."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, kind: str, text: str, given_up: threading.Event) -> str:
        process = self._started()
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            process.stdin.flush()
            answer = self._answer(process, given_up)
        if not answer.endswith(b"\n"):
            self.kill()
            if given_up.is_set():
                raise NobodyWaits
            if process.returncode not in OVER_LIMIT:
                raise CompilerStarved("the process that compiles grammars was ended: try again")
            raise GrammarError(f"it needs more than {CPU_S} s or {MEMORY >> 20} MB to compile: make it simpler")
        grammar, problem = json.loads(answer)
        if problem:
            raise GrammarError(problem)
        return str(grammar)

    def _answer(self, process: subprocess.Popen[bytes], given_up: threading.Event) -> bytes:
        """A line, or less when the process ended at a limit or is given up."""
        out, answer, end, poll = process.stdout, bytearray(), time.monotonic() + WAIT_S, select.poll()
        assert out is not None
        poll.register(out, select.POLLIN)
        while not answer.endswith(b"\n") and not given_up.is_set():
            if time.monotonic() >= end:
                self.kill()
                raise CompilerStarved("a grammar waits too long for time of the CPU to be compiled: try again")
            if poll.poll(POLL_S * 1000):
                if not (read := os.read(out.fileno(), 1 << 16)):
                    break
                answer += read
        return bytes(answer)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.kill()
            command = [sys.executable, "-c", _START, str(Path(__file__).parents[2]), str(MEMORY)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
