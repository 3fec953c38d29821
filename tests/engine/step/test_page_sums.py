"""Whatever another worker may read has its checksum: published pages, and all that the prefix cache holds."""

import pytest
from engine.drafting import engine, questions
from engine.harness import request
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import LeaseEnded, Route, Submit
from millrace_serve.engine.step.page_sums import PageSums


@pytest.mark.parametrize("num_pages", [80, 14], ids=["ample", "preempting"])
@pytest.mark.parametrize(("role", "drafts"), [(Role.UNIFIED, 0), (Role.UNIFIED, 2), (Role.PREFILL, 2)])
def test_pages_that_others_may_read_have_their_checksums(role: Role, drafts: int, num_pages: int) -> None:
    one = engine(drafts, role, checks=("checksum",), num_pages=num_pages, page_size=16, max_running=4)
    sums, cache, seen = PageSums(one.pool), one._scheduler.pages.cache, set[int]()
    route = Route.EXPORT if role is Role.PREFILL else Route.LOCAL
    for room, question in enumerate(questions()[:6]):
        one.submit(Submit(request(room + 1, question[:120], route, max_tokens=24)))
    while one.has_work():
        events = one.step()
        assert not [output.error for output in events.outputs if output.error]
        published = [page for part in events.chunks for page in part.page_ids]
        for pages in (published, list(cache._tree._by_page)):
            assert not pages or sums.wrong(pages) == []
            seen.update(pages)
        for part in events.chunks:
            if part.last:
                one.submit(LeaseEnded(part.id))
    assert len(seen) > 6
    one.check_idle()
    one.close()
