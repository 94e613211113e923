"""The documentation site in a real browser, by `make test-site`.

Screenshots of all pages are in build/site-shots.
"""

import functools
import http.server
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="`make test-site` installs playwright")

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
SHOTS = ROOT / "build" / "site-shots"
BUILDER = ROOT / "build" / "docs" / "bin" / "python"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: install the package of that name"),
    pytest.mark.skipif(not BUILDER.exists(), reason="`make docs` installs what builds the site"),
]
WIDE, PHONE = (1440, 900), (390, 844)
LOADED_BY_SCRIPT = "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"
# Content that sticks out of the window, unless something around it scrolls or hides it.
STICKING_OUT = """() => {
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= wide) return [];
  return [...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > wide + 1 && e.children.length === 0)
    .slice(0, 5).map(e => e.outerHTML.slice(0, 120));
}"""
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


@pytest.fixture(scope="module")
def site():
    """Build the site, and serve it on this machine."""
    built = subprocess.run([BUILDER, ROOT / "docs" / "make_site.py"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    serve = functools.partial(Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page_of(browser):
    """Return a function that opens an empty page of a size and a color scheme."""
    contexts = []

    def open_page(size, scheme="light"):
        width, height = size
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        return context.new_page()

    yield open_page
    for context in contexts:
        context.close()


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


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_search_finds_a_word(size, site, page_of):
    page = page_of(size)
    page.goto(f"{site}/index.html")
    if size == PHONE:
        page.locator("label.nav-overlay-icon:visible").first.click()
    page.locator("input.sidebar-search").fill("manifest")
    page.keyboard.press("Enter")
    page.locator("#search-results li a").first.wait_for()
    assert page.locator("#search-results li a", has_text="heckpoint").count() > 0


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


def test_a_diagram_goes_step_by_step_with_the_keyboard(site, page_of):
    page = page_of(PHONE)
    page.goto(f"{site}/how-it-works.html")
    drawing = page.locator("figure#batch")
    drawing.get_by_role("button", name="Next step").focus()
    for step in (1, 2):
        page.keyboard.press("Enter")
        assert drawing.locator(".step.on").get_attribute("data-step") == str(step)
    assert "2 of 6" in drawing.locator(".step-text").inner_text()
    assert "Plan." in drawing.locator(".step-text").inner_text()
    drawing.get_by_role("button", name="All steps").click()
    assert drawing.locator(".step.on").count() == 0
