"""The page of `gdsdata.top --serve` in a browser: what it shows, and how it looks.

`make test-site` runs it. The screenshots are in build/site-shots/top.
"""

import functools
import os
import threading

import numpy as np
import pytest
from browser import SHOTS, STICKING_OUT, window

import gdsdata
from gdsdata.observe import live
from gdsdata.observe.live import client, folder, rates, server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = {"wide": (1280, 900), "phone": (360, 740)}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serve the numbers of this process, which reads and saves meanwhile."""
    path = tmp_path_factory.mktemp("top")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "places", lambda: [str(path / "sockets")])
        (path / "samples").mkdir()
        for i in range(40):
            np.save(path / "samples" / f"{i}.npy", np.zeros(5000, np.float32))
        dataset = gdsdata.GDSDataset(path / "samples", batch_size=4, device="cpu")
        live.start()
        ends = threading.Event()

        def train():
            with gdsdata.AsyncCheckpointer(path / "run") as checkpointer:
                while not ends.is_set():
                    for _ in dataset:
                        ends.wait(0.02)
                    checkpointer.save(1, {"data": dataset})

        training = threading.Thread(target=train)
        one = server.Server("127.0.0.1", 0, rates.Sampler(client.ask, least_s=0.2))
        serving = threading.Thread(target=functools.partial(one.serve_forever, 0.05))
        training.start(), serving.start()
        yield one.url
        ends.set()
        one.shutdown()
        training.join(), serving.join()
        one.server_close()
        live.stop()


def until(page, condition):
    """Wait until an expression holds. playwright's own way is eval, which the policy forbids."""
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"this did not become true within a minute: {condition}")


@pytest.fixture
def page(browser, request, served):
    """Return the page in a window, after its second view; it must have no error."""
    size, scheme = request.param
    one = window(browser, SIZES[size], scheme)
    errors, asked = [], []
    one.on("pageerror", lambda error: errors.append(str(error)))
    one.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    one.on("request", lambda sent: asked.append(sent.url))
    one.goto(served)
    until(one, "document.querySelector('td')?.textContent.length > 1")
    until(one, "/MB\\/s|kB\\/s/.test(document.querySelector('.card b').textContent)")
    yield one
    one.screenshot(path=SHOTS / "top" / f"{SIZES[size][0]}-{scheme}-{request.node.originalname}.png", full_page=True)
    one.context.close()
    assert [one for one in errors if "status of 503" not in one] == []  # one test has the server refuse
    assert {url.removeprefix(served) for url in asked} <= {"", "view.json"}  # nothing from elsewhere


ALL = [(size, scheme) for size in SIZES for scheme in ("light", "dark")]
CONTRAST = """() => {
  const channels = text => text.match(/[\\d.]+/g).slice(0, 3).map(one => {
    const part = one / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = text => channels(text).reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const back = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
  };
  return [...document.querySelectorAll("h1, h2, th, td, .card > span, .card b, #state")].map(one => {
    const [low, high] = [light(getComputedStyle(one).color), light(back(one))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.mark.parametrize("page", ALL, ids="-".join, indirect=True)
def test_the_page_shows_the_process_and_fits_its_window(page):
    assert page.locator("h2").all_text_contents()[:3] == ["Processes", "Read and written", "Data sets"]
    assert page.locator("td").first.text_content() == str(os.getpid())
    assert "samples/0.npy and 39 more" in page.locator("#tables").text_content()
    until(page, "document.querySelector('svg path.line').getAttribute('d').split('L').length > 3")
    assert page.locator("svg path.line").count() >= 4
    assert page.evaluate(STICKING_OUT) == []  # wide tables scroll by themselves
    assert min(page.evaluate(CONTRAST)) >= 4.5  # WCAG 2.1, level AA


@pytest.mark.parametrize("page", [("phone", "light")], ids="-".join, indirect=True)
def test_a_wide_table_is_reached_and_scrolled_by_keyboard(page):
    region = "document.querySelector('.scroll[aria-label=\"Data sets\"]')"
    assert page.evaluate(f"{region}.scrollWidth > {region}.clientWidth")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Data sets":
            break
    page.keyboard.press("ArrowRight")
    until(page, f"{region}.scrollLeft > 0")
    before = page.locator("#state").text_content()
    until(page, f"document.getElementById('state').textContent !== {before!r}")
    until(page, "document.activeElement.getAttribute('aria-label') === 'Data sets'")
    assert page.evaluate(f"{region}.scrollLeft > 0")  # the next view keeps both


@pytest.mark.parametrize("page", [("wide", "light")], ids="-".join, indirect=True)
def test_the_page_says_when_the_server_is_gone_and_goes_on_when_it_is_back(page):
    page.route("**/view.json", lambda route: route.fulfill(status=503, body=""))
    until(page, "document.getElementById('state').textContent.includes('status 503')")
    page.unroute("**/view.json")
    until(page, "/^\\d\\d:\\d\\d:\\d\\d$/.test(document.getElementById('state').textContent)")


@pytest.mark.parametrize("page", [("wide", "light")], ids="-".join, indirect=True)
def test_a_name_that_a_process_chose_is_text_and_no_markup(page):
    def named(route):
        answer = route.fetch()
        view = answer.json()
        view["sections"][0]["rows"][0][2] = "<img src=x onerror=document.title='run'>"
        route.fulfill(response=answer, json=view)

    page.route("**/view.json", named)
    until(page, "document.querySelector('#tables').textContent.includes('<img src=x')")
    assert page.locator("#tables img").count() == 0 and page.title() == "gdsdata"
