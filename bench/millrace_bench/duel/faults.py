"""The timetable of faults, and how each strikes a server that runs."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from millrace_bench.data import read_data
from millrace_bench.duel.parts import GRACE_S, ROUTER, Part, Running

STRIKE = 0.25  # of a run's time, when its fault strikes


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    does: Literal["kill", "stop", "restart", "leave"]
    role: str = ""  # of the part that it strikes
    seconds: float = 0.0  # of a stop, or until clients leave
    clients: int = 0  # that leave


TIMETABLE = tuple(Fault(**one) for one in read_data("faults.yaml"))


def timetable(parts: Sequence[Part], faults: Sequence[Fault] = TIMETABLE) -> list[tuple[Fault, Part | None]]:
    """Each fault with its victim, the first part of its role; a unified server stands for a worker that is not there.
    Left out: a router that is not there, and what would strike the same victim in the same way again.
    """
    found: dict[tuple[str, str, float], tuple[Fault, Part | None]] = {}
    for fault in faults:
        roles = (ROUTER,) if fault.role == ROUTER else (fault.role, "unified")
        victim = next((part for role in roles for part in parts if fault.role and part.role == role), None)
        if victim is not None or not fault.role:
            found.setdefault((fault.does, victim.name if victim else "", fault.seconds), (fault, victim))
    return list(found.values())


async def strike(fault: Fault, victim: Part, running: Running) -> None:
    """A part that was killed or restarted is started again at once, as a supervisor would."""
    process = running.processes[victim.name]
    if fault.does == "stop":
        os.killpg(process.pid, signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        os.killpg(process.pid, signal.SIGCONT)
        return
    await (running.kill(victim) if fault.does == "kill" else process.stop(GRACE_S))
    await running.start(victim)
