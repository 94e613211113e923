"""Chromium for tests of pages (the fixture `browser`), and the folder of their screenshots.

`make test-site` installs playwright into build/docs. Chromium is the system's, or the one that
GDSDATA_CHROMIUM names. If one of them is missing, a test is skipped. With
GDSDATA_REQUIRE_BROWSER=1, which `make test-site` sets, it fails.
"""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

SHOTS = Path(__file__).resolve().parent.parent / "build" / "site-shots"
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Content that sticks out of the window, unless something around it scrolls or hides it.
STICKING_OUT = """() => {
  const wide = document.documentElement.clientWidth, page = document.documentElement.scrollWidth;
  if (page <= wide) return [];
  const out = new Set([...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > wide + 1));
  const innermost = [...out].filter(e => ![...e.children].some(child => out.has(child)));
  return [`the page has ${page} pixels of ${wide}`, ...innermost.slice(0, 5).map(e => e.outerHTML.slice(0, 120))];
}"""


def lacks(what):
    """Skip the test because something for it is not there, or fail it if that is required."""
    if os.environ.get("GDSDATA_REQUIRE_BROWSER", "0") not in ("", "0"):
        pytest.fail(f"GDSDATA_REQUIRE_BROWSER is set, but {what}", pytrace=False)
    pytest.skip(what)


@contextlib.contextmanager
def chromium():
    """Run Chromium without a window."""
    try:
        from playwright import sync_api
    except ImportError:
        lacks("there is no playwright: `make test-site` installs it into build/docs")
    named = os.environ.get("GDSDATA_CHROMIUM")
    program = next(filter(None, map(shutil.which, [named] if named else NAMES)), None)
    if program is None:
        lacks("there is no Chromium: install the package of that name")
    arguments = ["--no-sandbox", "--force-prefers-reduced-motion"]
    with sync_api.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=arguments)
        yield running
        running.close()


def window(running, size, scheme="light"):
    """Open a window of a size (width, height) and a color scheme. It is closed with its context."""
    width, height = size
    context = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-US")
    return context.new_page()
