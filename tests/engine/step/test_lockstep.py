"""Replicas that step together and followers that copy their leader, over threads."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from engine.harness import SETTINGS, TINY, Clock, FakeConnection, FakeReplicas, request
from engine.joined import ranks_together
from millrace_common.pace import FEW, LEAST_S
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Submit
from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.lockstep import lockstep, packing
from millrace_serve.engine.lockstep.links import RankLost
from millrace_serve.engine.lockstep.lockstep import Agreement, Lockstep
from millrace_serve.engine.lockstep.replicas import HEADER, VECTOR, Replicas
from millrace_serve.engine.schedule.plan import ContextParallelTurn, Plan, StepOutput
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.sim.factory import build_sim_engine
from millrace_serve.engine.sim.runner import SimRunner
from millrace_serve.engine.step.batch import HostBatch, StepBatch
from millrace_serve.model.context_parallel.split import Split


def test_alone_agrees_with_itself():
    assert not Lockstep().agree(None, last=False).anybody_works
    assert Lockstep().agree(Plan([Sequence(request(1, [5]), (0, 0), 9, frozenset(), [])], []), last=False).anybody_works
    assert [Lockstep().agree(None, last).last for last in (False, True)] == [False, True]


@pytest.mark.parametrize(
    ("num_queries", "agreement", "expected"),
    [
        (1, Agreement((3, 0), (4, 0), (7, 0), False), ((10, 0), (4, 0), False)),
        (4, Agreement((3, 0), (4, 0), (7, 0), False), ((19, 0), (4, 0), False)),
        (3, Agreement((2, 5, 0), (2, 5, 0), (0, 0, 0), False), ((6, 15, 0), (2, 5, 0), True)),
        (2, Agreement((1, 0), (1, 0), (0, 9), False), ((2, 9), (1, 0), False)),  # a chunk that does not end its prompt
        (4, Agreement((3,), (4,), (7,), False), ((), (), False)),  # alone
        (4, Agreement((3,), (3,), (0,), False), ((), (), True)),
    ],
)
def test_batch_knows_the_rows_of_all_replicas(num_queries, agreement, expected):
    batch = StepBatch.idle(num_queries)
    agreement.tell(batch)
    assert (batch.dp_num_tokens, batch.dp_num_sampled, batch.all_decode) == expected


@pytest.mark.parametrize(
    ("wants", "owner", "replica"),
    [((1, 1, 1), None, 0), ((1, 1, 1), 0, 1), ((1, 1, 1), 2, 0), ((0, 1, 0), 1, 1), ((1, 0, 1), 0, 2)],
)
def test_turn_goes_to_the_next_replica_that_wants_it(wants: tuple[int, ...], owner: int | None, replica: int) -> None:
    split = None if owner is None else Split(owner, 0, 3, 0, 9)
    assert [lockstep._turn(wants, split, me) for me in range(3)] == [
        ContextParallelTurn(me == replica, 3) for me in range(3)
    ]


def test_host_at_another_step_is_named() -> None:
    """Its vectors would be those of other sequences."""
    message = HEADER.pack(4, 0) + bytes(range(VECTOR.size))
    link = SimpleNamespace(rank=2, receive=lambda count: message)
    part = memoryview(bytearray(VECTOR.size))
    mine: Any = SimpleNamespace(_heard={2: part}, _step=4)
    Replicas._hear(mine, link)
    assert part == message[HEADER.size :]
    mine._step = 5
    with pytest.raises(RankLost, match="rank 2 is at step 4, not 5"):
        Replicas._hear(mine, link)


def test_idle_replica_steps_as_long_as_another_works():
    config = EngineConfig.model_validate(TINY)
    replicas, counts, steps = FakeReplicas(2), [[], []], [0, 0]
    outputs: list[list[int]] = [[], []]

    def replica(rank: int) -> None:
        engine = build_sim_engine(config, Role.UNIFIED, SETTINGS, Lockstep(replicas.of(rank)))
        launch = engine._runner.launch
        engine._runner.launch = lambda batch: (
            counts[rank].append((batch.num_tokens, batch.dp_num_tokens, batch.all_decode)),
            launch(batch),
        )[1]
        if rank == 0:
            engine.submit(Submit(request(1, [20, 21, 22], max_tokens=5)))
        while not engine.stopped:
            for output in engine.step().outputs:
                outputs[rank] += [token.token_id for token in output.tokens]
            steps[rank] += 1
            if rank == 1 and steps[rank] == 20:
                engine.stop()  # the other one hears of it in the next step
        assert not engine.has_work() and engine.wait_s() == 0  # another one calls
        engine.check_idle()

    ranks_together(replica, 2)
    assert len(outputs[0]) == 5 and outputs[1] == [] and steps == [21, 21]
    assert [agreed for _, *agreed in counts[0]] == [[(3, 0), False]] + [[(1, 0), True]] * 4
    assert counts[1] == [(0, *agreed) for _, *agreed in counts[0]]


def test_follower_runs_what_the_leader_shares():
    config = EngineConfig.model_validate(TINY)
    connection = FakeConnection()
    engine = build_sim_engine(config, Role.UNIFIED, SETTINGS, Lockstep(followers=[connection]))
    engine.submit(Submit(request(1, [20, 21, 22], max_tokens=5)))
    leader: list[int] = []
    while engine.has_work():
        leader += [token.token_id for output in engine.step().outputs for token in output.tokens]
    engine.close()
    pool = KvPool(engine.pool.layout, config.num_pages)
    runner, results = SimRunner(SETTINGS, pool, config), []
    # The oracle stands for the model, which a follower has too.
    runner._prompt_hash, runner._eos_from = engine._runner._prompt_hash, engine._runner._eos_from

    class Recording:
        def launch(self, batch: HostBatch) -> object:
            handle = runner.launch(batch)
            results.append(handle.result())
            return handle

    Lockstep(leader=connection).follow(Recording(), lambda copies: None)  # type: ignore[arg-type]
    assert [int(token) for result in results for token in result.tokens[:, 0]] == leader and len(leader) == 5
    assert all(isinstance(result, StepOutput) and not result.corrupt for result in results)


def test_pause_is_no_step_of_a_follower():
    """It takes the results of the last step before the pause when the next one is launched."""
    one, clock, limits = Lockstep(), Clock(), []
    one.progress = Progress(clock)
    data = packing.encode(dataclasses.replace(StepBatch.idle(), all_decode=True))

    def receive() -> bytes:
        clock.now += 3600.0 if len(limits) == FEW + 2 else 0.01
        return data if len(limits) < FEW + 4 else b""

    def launch(batch: HostBatch) -> object:
        limits.append(one.progress.limit_s)
        return SimpleNamespace(done=lambda: True, result=lambda: None)

    one._leader = SimpleNamespace(receive_message=receive)  # type: ignore[assignment]
    one.follow(SimpleNamespace(launch=launch), lambda copies: None)  # type: ignore[arg-type]
    assert limits[-3:] == [LEAST_S] * 3
