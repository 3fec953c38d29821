"""The router's indexes hold what the caches hold and no more, however many prompts come."""

from __future__ import annotations

from millrace_bench.index_growth import Settings, run


def test_entries_are_bounded_by_the_caches() -> None:
    s = Settings(seconds=60, requests=20, blocks=8, workers=5, pages=50, restart_s=4)
    results = run(s).results
    assert results["distinct_blocks"] == 60 * 20 * 8 and results["workers_lost"] == 15
    for row in results["rows"]:
        for name in ("kv_blocks", "kv_host_blocks"):
            assert row[name] <= 2 * s.workers * s.pages, "those of lost workers may not be cleaned yet"
        assert row["prefix_blocks"] <= min(results["distinct_blocks"], 200_000)
    assert results["rows"][-1]["kv_blocks"] > s.pages
