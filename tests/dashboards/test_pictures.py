"""The pictures of the guide: what is drawn from a recording, and that there is one of every board."""

import re
from pathlib import Path

import pytest
from millrace_dashboards import alerts
from millrace_dashboards.boards import dashboards
from millrace_testing.paths import ROOT
from millrace_testing.pictures.draw import Painter
from millrace_testing.pictures.record import record
from millrace_testing.prometheus import needs_prometheus

FIGURES = ROOT / "docs" / "figures"
URLS = [board.url.removeprefix("/d/") for board in dashboards(alerts.DEFAULTS)]


@pytest.mark.parametrize("name", URLS)
def test_every_board_has_a_picture_in_the_guide(name: str) -> None:
    """Small enough for a page with all of them."""
    assert 10_000 < (FIGURES / f"{name}.png").stat().st_size < 200_000
    guide = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    assert re.search(rf"!\[[^]]+\]\(\.\./figures/{name}\.png\)", guide)


@pytest.mark.long
@pytest.mark.e2e
@needs_prometheus
async def test_run_is_recorded(tmp_path: Path) -> None:
    recording = await record(tmp_path, (10.0, 2.0, 2.0))
    requests = [query for query in recording.answers if query.startswith("sum by (status) (rate(millrace_requests")]
    assert requests and all(recording.answers[query] for query in requests)
    for board in recording.boards:
        Painter(recording).save(board, tmp_path / "picture.png")
