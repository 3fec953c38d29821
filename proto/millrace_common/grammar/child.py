"""The process that compiles grammars for another one (checker.py). Its last argument is MEMORY.

A line of JSON comes in, [kind, text], and one goes out, [grammar of llguidance, ""] or ["", what is wrong]. One job
takes CPU_S seconds and the process MEMORY bytes, or the process ends.
"""

import json
import os
import resource
import sys
import threading
import time

from millrace_common.grammar.source import GrammarError, source
from millrace_common.process_start import no_core_dumps

CPU_S = 2
NICER = 10  # than the process that asks: that one answers all clients, on cores that it may share with this one
STACK_BYTES = 4 << 20  # less than a thread has that compiles what was compiled here


def main() -> None:
    os.nice(NICER)
    memory = int(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    no_core_dumps()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    for line in sys.stdin.buffer:
        spent = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_S, resource.RLIM_INFINITY))
        kind, text = json.loads(line)
        try:
            answer = [source(kind, text), ""]
        except GrammarError as error:
            answer = ["", str(error)]
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
