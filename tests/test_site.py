"""The documentation site in a real browser, by `make test-site`.

Screenshots of all pages are in build/site-shots.
"""

import contextlib
import functools
import http.server
import re
import subprocess
import threading
from pathlib import Path

import pytest
from browser import SHOTS, STICKING_OUT, lacks, window

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
BUILDER = ROOT / "build" / "docs" / "bin" / "python"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WIDE, PHONE = (1440, 900), (390, 844)
DIAGRAMS = [
    ("batch", "Order Plan Extents Engine Ring Consumer"),
    ("checkpoint", "Stage Write Sync Rename Agree Manifest Remove"),
]
LOADED_BY_SCRIPT = "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"
# Text of a drawing that lies outside of it, or over another text.
BAD_TEXT = """() => [...document.querySelectorAll("svg.drawn")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBBox()]);
  const {width, height} = svg.viewBox.baseVal;
  const outside = texts.filter(([, b]) => b.x < -1 || b.y < -1
    || b.x + b.width > width + 1 || b.y + b.height > height + 1);
  const over = texts.filter(([, a], i) => texts.some(([, b], j) => i < j && a.x < b.x + b.width && b.x < a.x + a.width
    && a.y + 2 < b.y + b.height - 2 && b.y + 2 < a.y + a.height - 2));
  return [...outside, ...over].map(([words]) => words);
})"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def copyfile(self, *files):
        with contextlib.suppress(ConnectionError):  # a page that is left before all of it has come
            super().copyfile(*files)


@pytest.fixture(scope="module")
def site(browser):
    """Build the site, and serve it on this machine."""
    if not BUILDER.exists():
        lacks("there is no build/docs: `make docs` installs what builds the site")
    built = subprocess.run([BUILDER, ROOT / "docs" / "make_site.py"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    serve = functools.partial(Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page_of(browser):
    """Return a function that opens an empty page of a size and a color scheme."""
    opened = []

    def open_page(size, scheme="light"):
        opened.append(window(browser, size, scheme))
        return opened[-1]

    yield open_page
    for page in opened:
        page.context.close()


def pages():
    left_out = {"genindex.html", "search.html"}
    found = (path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    return sorted(path for path in found if path not in left_out and not path.startswith("_"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_page_fits_the_window_and_loads_without_errors(size, scheme, site, page_of):
    page = page_of(size, scheme)
    problems = []
    now = ""
    page.on("console", lambda said: said.type == "error" and problems.append((now, said.text)))
    page.on("pageerror", lambda error: problems.append((now, str(error))))
    page.on("requestfailed", lambda request: problems.append((now, f"{request.url} was not loaded")))
    page.on("request", lambda request: request.url.startswith(site) or problems.append((now, f"asks {request.url}")))
    for now in pages():
        page.goto(f"{site}/{now}")
        problems += [(now, f"sticks out: {one}") for one in page.evaluate(STICKING_OUT)]
        problems += [(now, f"not loaded: {one}") for one in page.evaluate(LOADED_BY_SCRIPT)]
        problems += [(now, f"text of a drawing: {one}") for one in page.evaluate(BAD_TEXT)]
        shot = SHOTS / f"{size[0]}-{scheme}" / f"{now.removesuffix('.html').replace('/', '-')}.png"
        page.screenshot(path=shot, full_page=page.evaluate("document.body.scrollHeight") < 12000)
    assert len(pages()) > 30 and not problems, "\n".join(f"{where}: {what}" for where, what in problems)


def brightness(page, selector, name):
    """Return a color's brightness, from 0 to 255."""
    color = page.evaluate("([s, n]) => getComputedStyle(document.querySelector(s))[n]", [selector, name])
    return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]) / 3


def test_drawings_follow_the_switch_of_light_and_dark(site, page_of):
    page = page_of(WIDE, "light")
    page.goto(f"{site}/how-it-works.html")
    title = "svg.drawn text.ink"
    assert brightness(page, "body", "backgroundColor") > 200 and brightness(page, title, "fill") < 80
    for _ in range(3):  # light, dark and the system's setting take turns
        page.locator("button.theme-toggle:visible").first.click()
        if page.evaluate("document.body.dataset.theme") == "dark":
            break
    assert brightness(page, "body", "backgroundColor") < 60 and brightness(page, title, "fill") > 180


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_search_finds_a_word_and_its_results_can_be_read(size, scheme, site, page_of):
    page = page_of(size, scheme)
    page.goto(f"{site}/index.html")
    if size == PHONE:
        page.locator("label.nav-overlay-icon:visible").first.click()
    page.locator("input.sidebar-search").fill("manifest")
    page.keyboard.press("Enter")
    page.locator("#search-results li p.context").first.wait_for()
    page.locator("#search-results p.search-summary", has_text="found").wait_for()
    page.screenshot(path=SHOTS / f"{size[0]}-{scheme}" / "search.png")
    assert page.locator("#search-results li a", has_text="heckpoint").count() > 0
    assert page.evaluate(STICKING_OUT) == []
    back = brightness(page, "body", "backgroundColor")
    assert back < 60 if scheme == "dark" else back > 200
    for words in ("#search-results li a", "#search-results li p.context"):
        assert abs(brightness(page, words, "color") - back) > 80


def test_the_search_works_from_files_without_a_server(site, page_of):
    page = page_of(WIDE)
    page.goto(f"file://{SITE}/search.html?q=manifest")
    page.locator("#search-results li a").first.wait_for()
    assert "restore" in page.evaluate("Search._index ? Object.keys(Search._index.terms).join(' ') : ''")


def focused(page):
    return page.evaluate("document.activeElement.className + ' ' + (document.activeElement.getAttribute('href') || '')")


def test_the_keyboard_reaches_the_content_the_search_and_the_pages(site, page_of):
    page = page_of(WIDE)
    page.goto(f"{site}/guide/checkpoints.html")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(focused(page))
    assert "skip-to-content" in reached[0] and "#furo-main-content" in reached[0]
    assert any("sidebar-search" in one for one in reached)
    assert any(".html" in one for one in reached)
    page.reload()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.url.endswith("#furo-main-content")


def test_the_keyboard_opens_the_navigation_of_a_phone(site, page_of):
    page = page_of(PHONE)
    page.goto(f"{site}/index.html")
    search = page.locator("input.sidebar-search")
    assert search.bounding_box()["x"] < 0
    page.locator("label.nav-overlay-icon:visible").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('input.sidebar-search').getBoundingClientRect().x >= 0")
    search.fill("doctor")
    page.keyboard.press("Enter")
    page.locator("#search-results li a").first.wait_for()


@pytest.mark.parametrize(("name", "titles"), DIAGRAMS)
def test_a_diagram_goes_step_by_step_with_the_keyboard(name, titles, site, page_of):
    page, titles = page_of(PHONE), titles.split()
    page.goto(f"{site}/how-it-works.html")
    drawing = page.locator(f"figure#{name}")
    said, current = drawing.locator(".step-text"), drawing.locator(".step.on")
    drawing.get_by_role("button", name="Next step").focus()
    for step, title in enumerate(titles, 1):
        page.keyboard.press("Enter")
        assert current.get_attribute("data-step") == str(step) and title in current.text_content()
        assert said.inner_text().split()[:4] == [str(step), "of", f"{len(titles)}.", f"{title}."]
    assert drawing.get_by_role("button", name="Next step").is_disabled()
    drawing.screenshot(path=SHOTS / f"{PHONE[0]}-light" / f"steps-of-{name}.png")
    drawing.get_by_role("button", name="Back").click()
    assert current.get_attribute("data-step") == str(len(titles) - 1)
    drawing.get_by_role("button", name="All steps").click()
    assert current.count() == 0


def test_every_diagram_with_steps_is_one_that_is_walked_through(site):
    figures = re.compile(r'<figure class="drawing" id="(\w+)">(?:(?!</figure>).)*class="step"', re.DOTALL)
    assert sorted(name for path in pages() for name in figures.findall((SITE / path).read_text())) == sorted(
        dict(DIAGRAMS)
    )


WIDER = [
    "<p style='width: 2000px'>a leaf</p>",
    "<style>p::after {content: ''; display: block; width: 2000px; height: 1px}</style><p>none sticks out</p>",
    "<p style='white-space: nowrap'>" + "text beside a child, " * 30 + "<b style='position: fixed; left: 0'>b</b></p>",
]


@pytest.mark.parametrize("body", WIDER, ids=["leaf", "no-element", "text"])
def test_a_page_wider_than_its_window_is_found(body, page_of):
    page = page_of(PHONE)
    page.set_content(body)
    assert f"pixels of {PHONE[0]}" in page.evaluate(STICKING_OUT)[0]
    page.set_content(f"<div style='overflow: auto'>{body}</div>")
    assert page.evaluate(STICKING_OUT) == []
