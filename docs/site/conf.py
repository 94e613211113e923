"""Settings of Sphinx for docs/make_site.py, which assembles the pages that Sphinx reads."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

project = "gdsdata"
author = "The gdsdata developers"
release = re.search(r'"([\d.]+)"', (ROOT / "gdsdata" / "version.py").read_text())[1]
html_title = f"gdsdata {release}"

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
language = "en"
myst_heading_anchors = 4  # as GitHub's: pages link to headings by them

html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"
