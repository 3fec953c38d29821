"""The page of a router's operators in a browser, over a system of simulated workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from millrace_cli.cluster import ClusterSpec
from millrace_testing import HANG_S
from millrace_testing.browser import browser, needs_browser
from millrace_testing.inside_cluster import InsideCluster
from millrace_testing.prometheus import free_port

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [needs_browser, pytest.mark.asyncio(loop_scope="module")]
KEY = "sk-page-0123456789abcdef0123456789"
NAME = "<b onclick=alert(1)>tiny</b>"
WORKERS, PAIRS = "#worker-rows tr", "#pair-rows tr"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimpleNamespace]:
    """Pages at 127.0.0.1 may read the public port's answers, pages at localhost may not."""
    folder, port = tmp_path_factory.mktemp("page"), free_port()
    (folder / "keys").write_text(json.dumps({"keys": [{"name": "one", "key": KEY}]}))
    spec = ClusterSpec(
        decode=2,
        engine="sim",
        ports={"admin_http": port},
        worker_set=(f"served_name={NAME}",),
        router_set=(f"api_keys={folder / 'keys'}", f'connections.cors=["http://127.0.0.1:{port}"]'),
    )
    async with InsideCluster(spec) as cluster, browser(folder) as started:
        yield SimpleNamespace(cluster=cluster, browser=started, port=port)


@pytest_asyncio.fixture(loop_scope="module")
async def page(system: SimpleNamespace) -> AsyncIterator[Page]:
    """Opened. It may ask the two ports alone, and nothing that it does is an error of its own."""
    opened, errors, urls = await system.browser.new_page(), [], []
    opened.set_default_timeout(HANG_S * 1000)
    opened.on("pageerror", lambda error: errors.append(error))
    opened.on("request", lambda request: urls.append(request.url))
    await opened.goto(system.cluster.admin_http_url)
    await opened.locator(WORKERS).first.wait_for()
    yield opened
    await opened.close()
    ports = {urlsplit(system.cluster.http_url).port, system.port}
    assert {urlsplit(url).port for url in urls} <= ports and not errors
    assert {urlsplit(url).hostname for url in urls} <= {"127.0.0.1", "localhost"}


async def shows(page: Page, selector: str, text: str) -> None:
    await page.locator(selector, has_text=text).first.wait_for()


async def test_workers_pairs_and_what_was_served(system: SimpleNamespace, page: Page) -> None:
    ask = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    key = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=system.cluster.http_url, headers=key, timeout=HANG_S) as http:
        assert (await http.post("/v1/chat/completions", json=ask)).status_code == 200
        assert (await http.post("/v1/chat/completions", json=ask | {"max_tokens": 10**6})).status_code == 400
    await shows(page, "#state", "ready")
    rows = await page.locator(WORKERS).all_inner_texts()
    for name, row in zip(("prefill-0", "decode-0", "decode-1"), rows, strict=True):
        assert system.cluster.address(name) in row and name.partition("-")[0] in row and "ready" in row
    assert await page.locator("#workers-sum").inner_text() == "3 of 3 get requests"
    await page.locator("summary").focus()
    await page.keyboard.press("Enter")
    assert await page.locator(PAIRS).count() == 2 and await page.locator("#pairs-sum").inner_text() == "2 of 2 ready"
    await shows(page, "#end-rows tr", "ok")
    await shows(page, "#end-rows tr", "context too long")
    await shows(page, "#no-retries", "No attempt failed.")
    await shows(page, "figure:has-text('first token') b", "s")  # or ms
    assert await page.locator("figure path[d*=M]").count() >= 6


async def test_names_are_text(page: Page) -> None:
    assert await page.locator("#model").inner_text() == NAME
    assert await page.locator("#model *").count() == 0


async def test_policy_stops_what_the_page_does_not_do(system: SimpleNamespace) -> None:
    opened = await system.browser.new_page()
    await opened.goto(system.cluster.admin_http_url)
    stopped = await opened.evaluate(
        """async () => {
            const seen = new Set();
            document.addEventListener("securitypolicyviolation", (event) => seen.add(event.effectiveDirective));
            await fetch("http://127.0.0.1:9/").catch(() => 0);
            document.body.append(Object.assign(document.createElement("img"), { src: "http://127.0.0.1:9/" }));
            document.body.append(Object.assign(document.createElement("iframe"), { src: "/" }));
            try { document.body.innerHTML = "<i>x</i>"; } catch { /* trusted types */ }
            while (seen.size < 4) await new Promise((done) => setTimeout(done));
            return [...seen].sort();
        }"""
    )
    assert stopped == ["connect-src", "frame-src", "img-src", "require-trusted-types-for"]
    await opened.close()


async def test_playground_streams_an_answer_with_a_key_that_is_not_kept(page: Page) -> None:
    await page.locator("#message").focus()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")  # as in any form
    await shows(page, "#facts", "401: ")
    await shows(page, "#facts", "Type an API key.")
    await page.locator("#key").fill(KEY)
    await page.locator("#send").click()
    await shows(page, "#facts", "64 tokens in ")
    assert await page.locator("#answer").inner_text()
    assert await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.search]") == [
        *(0, 0), *("", "")
    ]  # fmt: skip
    await page.reload()
    assert await page.locator("#key").input_value() == ""


async def test_request_that_is_refused_or_stopped_says_so(page: Page) -> None:
    await page.locator("#key").fill("ключ")
    await page.locator("#send").click()
    await shows(page, "#facts", "ISO-8859-1")
    await page.locator("#key").fill(KEY)
    await page.locator("#max-tokens").fill("1000000")
    await page.locator("#send").click()
    await shows(page, "#facts", "400: ")
    await page.locator("#max-tokens").fill("4000")
    await page.locator("#send").click()
    await shows(page, "#send", "Stop")
    await page.locator("#send").click()
    await shows(page, "#facts", "Stopped.")


async def test_page_that_may_not_read_answers_names_the_setting(system: SimpleNamespace, page: Page) -> None:
    origin = f"http://localhost:{system.port}"
    await page.goto(origin)
    await page.locator(WORKERS).first.wait_for()
    await page.locator("#send").click()
    await shows(page, "#facts", f'Add "{origin}" to its setting connections.cors')


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
async def test_it_fits_every_width(page: Page, width: int, scheme: str) -> None:
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size({"width": width, "height": 800})
    await page.locator("summary").click()
    assert await page.evaluate("document.documentElement.scrollWidth") == width
    colors = await page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    dark = [sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) < 384 for color in colors]
    assert dark == [scheme == "light", scheme == "dark"]


async def test_worker_that_dies_is_seen_and_one_that_comes_back(system: SimpleNamespace, page: Page) -> None:
    cluster = system.cluster
    row = f"{WORKERS}:has-text('{cluster.address('decode-1')}')"
    await cluster.end("decode-1")
    await shows(page, row, "unreachable")
    await shows(page, "#workers-sum", "2 of 3 get requests")
    await shows(page, "#state", "ready")
    await cluster.restart("decode-1")
    await shows(page, "#workers-sum", "3 of 3 get requests")
    await shows(page, row, "ready")


async def test_router_that_is_gone_is_said_and_that_what_is_shown_is_older(system: SimpleNamespace, page: Page) -> None:
    await system.cluster.end("router")
    await shows(page, "#trouble", "What is below is older.")
    await shows(page, "#state", "no answer")
    await system.cluster.restart("router")
    await shows(page, "#state", "ready")
    await page.locator("#trouble").wait_for(state="hidden")
