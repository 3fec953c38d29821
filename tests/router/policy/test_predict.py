"""Placement by predicted times: a table of situations, and what each candidate is expected to do."""

import functools
from dataclasses import replace

import pytest
from millrace_common.split import Slo
from millrace_common.step_times import StepTimes
from millrace_router.config import NO_HURRY_S, Policy, Routing
from millrace_router.policy.choose import Chooser, Decision, Situation
from millrace_router.policy.predict import HANDOVER_S
from millrace_router.policy.snapshot import PlacementRequest, Replica, View
from router.policy import test_choose

# A step takes 20 ms, each prompt token 50 µs: a step of 40 ms has 400 prompt tokens beside no streams to speak of.
TIMES = StepTimes(fixed_s=0.02, sequence_s=1e-4, token_s=5e-5)
SLO = Slo(ttft_s=1.0, tpot_s=0.04)
replica = functools.partial(test_choose.replica, times=TIMES)


def prefill(**fields: object) -> Replica:
    return replica("p", **fields)


def decode(name: str = "d", **fields: object) -> Replica:
    return replica(name, sources=frozenset({"e-p"}), **fields)


def decided(
    view: View, want: PlacementRequest, pages: dict | None = None, prefill_pages: dict | None = None
) -> Decision | None:
    chooser = Chooser(Policy.LEAST_LOADED, Policy.LEAST_LOADED, Routing())
    return chooser.choose(Situation(view, want, decode_pages=pages or {}, prefill_pages=prefill_pages or {}))


def way(view: View, want: PlacementRequest, **pages: dict) -> str | None:
    decision = decided(view, want, **pages)
    return None if decision is None else decision.route


LONG, SHORT = PlacementRequest(4000, outputs=99, slo=SLO), PlacementRequest(100, outputs=99, slo=SLO)
AT_WORK = {"streams": 60, "held": 100_000}  # 26 ms a step: 280 prompt tokens fit into 40 ms
WARM = {("e-d", 0): 60}  # 3,840 tokens


@pytest.mark.parametrize(
    ("p", "d", "want", "pages", "expected"),
    [
        (prefill(), decode(**AT_WORK), LONG, {}, "pair"),  # 240 ms there, 570 ms here
        (prefill(tokens=8000), decode(**AT_WORK), LONG, {}, "local"),  # it would wait
        (prefill(tokens=8000), decode(**AT_WORK, tokens=8000), LONG, {}, "pair"),  # nobody is in time
        (prefill(), decode(**AT_WORK), SHORT, {}, "local"),  # 31 ms here, 25 ms there and a handover
        (prefill(tokens=500), decode(**AT_WORK), SHORT, {}, "local"),
        (prefill(), decode(**AT_WORK), LONG, WARM, "local"),  # the prompt is there but for 160 tokens
        (prefill(), decode(streams=210), SHORT, {}, "pair"),  # 41 ms a step: no time for prompts
        (prefill(capacity=0), decode(**AT_WORK), LONG, {}, "local"),
        (prefill(room=0), decode(**AT_WORK), LONG, {}, "local"),
        (prefill(), decode(room=0), LONG, {}, None),
        (prefill(), decode(revision="b"), SHORT, {}, "local"),
        (prefill(), decode(times=StepTimes(), **AT_WORK), SHORT, {}, "local"),  # the other's times are taken
        (prefill(times=StepTimes()), decode(times=StepTimes()), SHORT, {}, "pair"),  # nobody has measured
        (prefill(), decode(**AT_WORK), PlacementRequest(100, outputs=99), {}, "pair"),  # no limits
        (
            prefill(tokens=9000),
            decode(),
            PlacementRequest(100, outputs=1, slo=SLO),
            {},
            "local",
        ),  # one token needs no decode worker
        (prefill(), decode(**AT_WORK), PlacementRequest(4000, outputs=1, slo=SLO), {}, "prefill_only"),
    ],
)
def test_where_the_first_token_is_earliest_within_the_limits(
    p: Replica, d: Replica, want: PlacementRequest, pages: dict, expected: str | None
) -> None:
    assert way(View((p,), (d,)), want, pages=pages) == expected


def test_who_exceeds_the_limits_least() -> None:
    slow, full = decode("d1", streams=220), decode("d2", streams=300)
    decision = decided(View((prefill(),), (full, slow)[::-1]), LONG)
    assert decision is not None and decision.placement.decode == slow
    idle = decode("d3")
    decision = decided(View((prefill(),), (slow, full, idle)), LONG)
    assert decision is not None and decision.placement.decode == idle


def test_within_the_limits_rather_than_early() -> None:
    full, busy = replica("u1", streams=200), replica("u2", tokens=2000)  # 41 ms and 40.1 a token; 125 ms and 20.1
    slow = replica("u3", times=replace(TIMES, fixed_s=0.05))  # idle, with 50 ms a token
    decision = decided(View((), (), (slow, busy)), PlacementRequest(10, outputs=99, slo=SLO))
    assert decision is not None and decision.placement.decode == busy
    decision = decided(View((), (), (full, busy)), PlacementRequest(10, outputs=99, slo=SLO))
    assert decision is not None and decision.placement.decode == busy
    assert (
        decided(View((), (), (full, busy)), PlacementRequest(10, outputs=99, slo=Slo(ttft_s=1.0))).placement.decode
        == full
    )


@pytest.mark.parametrize(("tokens", "chosen"), [(0, "b"), (8_000, "b"), (25_000, "b"), (40_000, "a")])
def test_a_prompt_waits_rather_than_delay_streams_from_before_a_change_of_duty(tokens: int, chosen: str) -> None:
    """4,000 tokens cost 60 streams some 3 of their limits: as a first token at twice its own limit."""
    before, other = replica("a", flexible=True, **AT_WORK), replica("b", tokens=tokens)
    target = replica("d", sources=frozenset({"e-a", "e-b"}), streams=210)
    found = decided(View((before, other), (target,)), LONG)
    assert found is not None and found.placement.prefill is not None
    assert found.placement.prefill.address == chosen


@pytest.mark.parametrize(("streams", "route"), [(60, "local"), (140, "local"), (175, "pair")])
def test_a_prompt_keeps_away_from_streams_whose_limit_leaves_less_than_a_page(streams: int, route: str) -> None:
    """With 175 streams a step takes 37.5 ms, and the limit leaves 50 tokens."""
    assert way(View((prefill(tokens=4000),), (decode(streams=streams),)), SHORT) == route


def test_a_unified_replica_competes_with_pairs() -> None:
    view = View((prefill(tokens=4000),), (decode(**AT_WORK),), (replica("u"),))
    assert way(view, LONG) == "unified"
    busy = View((prefill(),), view.decode, (replica("u", tokens=4000, **AT_WORK),))
    assert way(busy, LONG) == "pair"


def test_a_flexible_replica_runs_anything_when_nobody_else_can() -> None:
    for want in (LONG, PlacementRequest(4000, outputs=99), PlacementRequest(10, outputs=1)):
        assert way(View((), (decode(flexible=True),)), want) == "local"
        assert way(View((prefill(flexible=True, room=9000),), ()), want) in ("local", "prefill_only")
    assert way(View((), (decode(),)), PlacementRequest(4000, outputs=99)) is None


def test_a_flexible_prefill_worker_gets_some_seconds_of_prompts() -> None:
    busy = decode(capacity=4, tokens=90_000)
    for tokens, expected in ((79_000, "pair"), (81_000, "local")):
        assert way(View((prefill(flexible=True, tokens=tokens, room=10**6),), (busy,)), LONG) == expected
        fixed = View((prefill(tokens=tokens),), (busy,))
        assert way(fixed, LONG) == "pair"


def test_the_explanation_has_the_predicted_times() -> None:
    decision = decided(View((prefill(),), (decode(**AT_WORK),)), LONG)
    assert decision is not None
    rows = {selection.role: selection.candidates[0] for selection in decision.explain()}
    assert list(rows) == ["whole", "prefill", "decode"]
    assert rows["prefill"].first_token_s == pytest.approx(0.02 * 4000 / 2048 + 4000 * 5e-5)
    assert rows["prefill"].tpot_s == 0 == rows["decode"].first_token_s
    assert rows["decode"].tpot_s == rows["whole"].tpot_s == pytest.approx(0.02 + 61e-4)
    assert rows["prefill"].first_token_s + HANDOVER_S < rows["whole"].first_token_s
    assert all(row.chosen for row in rows.values())
    assert {selection.policy for selection in decision.explain()} == {"predicted"}


def test_former_settings_turn_it_on(caplog: pytest.LogCaptureFixture) -> None:
    for former in ({"local_prefill_tokens": 256}, {"local_prefill_wait": 0.25}):
        routing = Routing.model_validate(former)
        assert routing.slo.ttft == NO_HURRY_S and routing.slo.tpot is None
        assert "routing.slo" in caplog.text
    assert not Routing.model_validate({"local_prefill_tokens": 0}).slo.slo.limited
    kept = Routing.model_validate({"local_prefill_tokens": 256, "slo": {"tpot": 0.04}})
    assert kept.slo.tpot == 0.04 and kept.slo.ttft is None
