"""Flexible workers and static splits in simulation."""

from dataclasses import replace

import pytest
from millrace_bench.duties import LIMIT, fit, machine, result, simulate
from millrace_bench.pd_load import Load, Segment, changing
from millrace_common.step_times import StepTimes, prompt_pairs

TIMES = StepTimes(0.02, 5e-5, 1e-8, 0.01, 2e-5, 1e-8)


def rows(times: StepTimes) -> list[dict[str, object]]:
    decode = [(16, 4096), (64, 1024), (64, 4096), (128, 2048)]
    prompts, chunks = [(1, 512), (1, 4096), (4, 4096)], [(64, 4096, 64), (64, 4096, 1024)]
    steps: list[dict[str, object]] = []
    for count, length in decode:
        steps.append({"kind": "decode", "count": count, "length": length, "s": times.step_s(count, count * length)})
    for count, length in prompts:
        seconds = times.step_s(0, 0, count * length, count * length * length / 2)
        steps.append({"kind": "prefill", "count": count, "length": length, "s": seconds})
    for count, length, chunk in chunks:
        seconds = times.step_s(count, count * length, chunk, chunk / length * prompt_pairs(0, length, chunk))
        steps.append({"kind": "mixed", "count": count, "length": length, "chunk": chunk, "s": seconds})
    return [{**step, "ms": 1e3 * step.pop("s")} for step in steps]  # type: ignore[operator]


def test_the_times_of_steps_come_back() -> None:
    found = fit(rows(TIMES))
    assert all(getattr(found, name) == pytest.approx(getattr(TIMES, name), rel=1e-6) for name in StepTimes.__slots__)
    assert fit(rows(TIMES)[:4], StepTimes(chunk_s=0.5)).chunk_s == 0.5, "what the rows do not tell stays"


def test_measured_decode_steps_are_fitted_to_a_twentieth() -> None:
    times, found = fit(result("h100/mixed-steps")), result("h100/mixed-steps")
    decode = [row for row in found if row["kind"] == "decode"]
    for row in decode:
        assert 1e3 * times.step_s(row["count"], row["count"] * row["length"]) == pytest.approx(row["ms"], rel=0.05)


@pytest.mark.parametrize("system", ["3p+1d", "4u", "4flex"])
def test_a_light_load_is_within_its_limits_in_every_system(system: str) -> None:
    load = Load.parse("256/32x2@8")
    row = simulate(system, [Segment(load, 8.0, 6.0, 1)], machine(TIMES, LIMIT), LIMIT)
    assert row["requests"] == row["completed"] > 20 and row["goodput"] == row["requests"] / 6.0


def test_duties_follow_a_load_that_changes() -> None:
    """Long prompts, then long outputs: no static split serves both as well as flexible workers."""
    segments = changing([Load.parse("4096/64@11"), Load.parse("256/512@60")], 15.0, 1, 1)
    goodput = {}
    for system in ("3p+1d", "1p+3d", "4flex"):
        row = simulate(system, segments, machine(TIMES, LIMIT), LIMIT)
        goodput[system] = row["goodput"]
        assert bool(row["changes"]) is (system == "4flex") and len(row["parts"]) == 2
    flexible = goodput.pop("4flex")
    assert flexible > max(goodput.values()), (flexible, goodput)


def test_workers_that_have_seen_few_sequences_get_many() -> None:
    """Each of few sequences reads further experts, as each of many does not: whose steps were taken for those of many,
    that worker would get no more.
    """
    warm = Segment(Load.parse("4096/256@1"), 1.0, 10.0, 7)
    load = Segment(Load.parse("4096/256@11"), 11.0, 15.0, 1, begin_s=10.0)
    made = replace(machine(TIMES, LIMIT), experts_s=0.6 * TIMES.fixed_s)
    row = simulate("4flex", [warm, load], made, LIMIT, lead_s=10.0)
    best = simulate("3p+1d", [warm, load], made, LIMIT, lead_s=10.0)
    assert row["goodput"] > 0.8 * best["goodput"] > 5, (row["goodput"], best["goodput"], row["changes"])
