"""What it costs the host that ranks step together: the agreement of replicas, and batches on their way to followers.

python -m millrace_bench.stepping --out bench/results/stepping.json
python -m millrace_bench.stepping --agreements 8/1 --groups 8 --steps 100     a smaller run

Every rank is a process, and hosts are simulated: their ranks are connected by Unix sockets, and hosts over loopback.
Beside it the same with torch.distributed: an all-gather of gloo, and pickled batches in two broadcasts of gloo.

cpu_us    CPU time of a rank's process per step, the median of the ranks of a kind, all threads included
wall_us   per step; with more ranks than cores they wait for the cores, not for each other
alone_us  the work of one rank after the other in one process, so that nobody waits. A member tells its vector and
          hears those of all; a node leader hears its members, tells and hears node leaders, and tells its members.
          Their sum, alone_path_us, is the critical path without the wire and the wake-ups: the host time per step that
          the goals bound (60 us with 8 replicas, 200 with 72).

The load averages (one minute) before and after the run are in the record: its own ranks raise the second one.
"""

import itertools
import os
import pickle
import select
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from operator import methodcaller

import torch
import torch.distributed as dist
from millrace_load.options import CommandLine, form
from millrace_load.record import Record, Row, print_record, printed
from millrace_serve.engine.config import Limits
from millrace_serve.engine.lockstep import packing
from millrace_serve.engine.lockstep.join import Exchange
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.replicas import Replicas, ReplicaState
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.start.profiling_run import StepShape, batch_of

from millrace_bench.stepping_ranks import Step, joined, measure, threads

PAUSE_S = 0.02
STATE = ReplicaState(128, 0, 0, 0, 0, 0, 0)
NEEDS = """Needs Linux, torch for a CPU, and 1 GiB of memory: 72 ranks are 72 processes, which share most of
theirs. Two cores are enough; with more ranks than cores, wall times are waits for a core. A rank that has not answered
for 120 s ends the run: where others load the cores, take fewer ranks (--agreements 8/1 --groups 8)."""
SEQUENCES = 128  # of a decode step's batch


def run(agreements: Sequence[Sequence[int]], groups: Sequence[int], steps: int) -> Iterator[Row]:
    """`agreements`: replicas and hosts; `groups`: ranks of a replica on one host."""
    for replicas, hosts in agreements:
        count = max(steps * 2 // replicas, 40)
        yield _agreement("sockets", replicas, hosts, count) | alone(replicas, hosts)
        yield _agreement("gloo", replicas, hosts, count)
        yield _wake(replicas, hosts, 40)
    for ranks in groups:
        yield _batches("sockets", ranks, steps)
        yield _batches("gloo", ranks, steps)


def _agreement(kind: str, replicas: int, hosts: int, steps: int) -> Row:
    def make(rank: int, exchange: Exchange) -> Step:
        lockstep = joined(rank, 1, replicas, hosts, exchange)
        return lambda: _replicas(lockstep).all_gather(STATE, ring=False)

    def make_gloo(rank: int, exchange: Exchange) -> Step:
        _init_gloo(rank, replicas, exchange)
        out = torch.empty(replicas * len(STATE), dtype=torch.int64)
        return lambda: (dist.all_gather_into_tensor(out, torch.tensor(STATE)), out.view(replicas, -1).tolist())

    cpu, wall = measure(replicas, make_gloo if kind == "gloo" else make, steps)
    node_leaders = range(0, replicas, replicas // hosts)
    members = [rank for rank in range(replicas) if rank not in node_leaders]
    row = {"kind": "agreement", "over": kind, "replicas": replicas, "hosts": hosts, "steps": steps, "wall_us": wall}
    parts = {"member": members} if kind == "gloo" else {"member": members, "node_leader": node_leaders}
    return row | {f"{name}_cpu_us": round(statistics.median(cpu[r] for r in ranks), 1) for name, ranks in parts.items()}


def _wake(replicas: int, hosts: int, steps: int) -> Row:
    """From the first word of the last replica until all agree, when all have slept; and the CPU time of both and of the
    step in which they fall asleep again.
    """

    def make(rank: int, exchange: Exchange) -> Step:
        lockstep = joined(rank, 1, replicas, hosts, exchange)
        calls, wakeup_pipe = rank == replicas - 1, select.poll()
        for fd in lockstep.fds:
            wakeup_pipe.register(fd, select.POLLIN)

        def step() -> float:
            if calls:
                time.sleep(PAUSE_S)
            while not (calls or lockstep.due()):
                wakeup_pipe.poll()
            started = time.perf_counter()
            lockstep.agree(Plan([], [], wants_turn=True) if calls else None, False)
            seconds = time.perf_counter() - started
            lockstep.agree(None, False)
            return seconds

        return step

    cpu, wall = measure(replicas, make, steps)
    times = {"wall_us": wall, "cpu_us": round(statistics.median(cpu), 1)}
    return {"kind": "wake", "replicas": replicas, "hosts": hosts, "steps": steps, **times}


def _batches(kind: str, ranks: int, steps: int) -> Row:
    batch = batch_of(StepShape(num_decode=SEQUENCES), Limits(num_pages=9, max_model_len=256, max_running=SEQUENCES))
    batch.updates = None

    def make(rank: int, exchange: Exchange) -> Step:
        lockstep = joined(rank, ranks, 1, 1, exchange)
        leader = lockstep._leader
        return (lambda: lockstep.share(batch)) if leader is None else lambda: packing.decode(leader.receive_message())

    def make_gloo(rank: int, exchange: Exchange) -> Step:
        _init_gloo(rank, ranks, exchange)
        return (lambda: _broadcast(pickle.dumps(batch, 5))) if rank == 0 else lambda: pickle.loads(_broadcast(None))

    cpu, wall = measure(ranks, make_gloo if kind == "gloo" else make, steps)
    row = {"kind": "batch", "over": kind, "ranks": ranks, "sequences": SEQUENCES, "steps": steps, "wall_us": wall}
    return row | {"leader_cpu_us": cpu[0], "follower_cpu_us": round(statistics.median(cpu[1:]), 1)}


def alone(replicas: int, hosts: int, steps: int = 300) -> Row:
    """Median microseconds of the parts of a step, one rank after the other."""
    joined_ranks = threads(replicas, hosts)
    ranks = [_replicas(lockstep) for lockstep in joined_ranks]
    node_leader, member = ranks[0], ranks[1]
    others = ranks[2:]
    members = [rank for rank in others if not rank._is_node_leader]
    node_leaders = [rank for rank in others if rank._is_node_leader]
    bring, learn = methodcaller("_bring", STATE, ring=False), methodcaller("_learn", ring=False)
    parts = [(bring, some) for some in ([member], [*members, *node_leaders], [node_leader])]
    parts += [(learn, some) for some in (node_leaders, [node_leader], members, [member])]
    times: list[tuple[float, float]] = []
    for _ in range(steps):
        marks = [time.perf_counter()]
        for work, some in parts:
            for rank in some:
                work(rank)
            marks.append(time.perf_counter())
        spent = [end - start for start, end in itertools.pairwise(marks)]
        times.append((spent[0] + spent[6], spent[2] + spent[4]))
    for lockstep in joined_ranks:
        lockstep.close()
    medians = [round(statistics.median(column) * 1e6, 1) for column in zip(*times, strict=True)]
    return {"alone_member_us": medians[0], "alone_node_leader_us": medians[1], "alone_path_us": round(sum(medians), 1)}


def _replicas(lockstep: Lockstep) -> Replicas:
    assert isinstance(lockstep._replicas, Replicas)
    return lockstep._replicas


def _init_gloo(rank: int, ranks: int, exchange: Exchange) -> None:
    folder = exchange(tempfile.mkdtemp().encode() if rank == 0 else b"")[0].decode()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a newer torch has other names for these calls
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)


def _broadcast(data: bytes | None) -> bytes:
    """As Millrace did it: the size first."""
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, 0)
    content = (
        torch.empty(int(size), dtype=torch.uint8)
        if data is None
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    dist.broadcast(content, 0)
    return content.numpy().tobytes()


def main() -> None:
    about = "Host time of stepping together, beside that of torch.distributed."
    parser = CommandLine("python -m millrace_bench.stepping", about, NEEDS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--agreements", nargs="+", default=[(2, 1), (8, 1), (72, 9)], **form("REPLICAS/HOSTS"))
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 8], help="ranks of a tensor-parallel replica")
    args = parser.parse_args()
    config = {"steps": args.steps, "load_average_before": os.getloadavg()[0]}
    rows = printed(run(args.agreements, args.groups, args.steps))
    print_record(Record("stepping", config | {"load_average_after": os.getloadavg()[0]}, {"rows": rows}))


if __name__ == "__main__":
    main()
