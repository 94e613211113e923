"""report.html: report.md as one page with its pictures inside, light or dark as the system is."""

import base64
import html
import mimetypes
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --text: #1d2528; --paper: #ffffff; --line: #d5dcdf; --head: #f0f4f5;
  --mark: #1f6f8b; }
@media (prefers-color-scheme: dark) {
  :root { --text: #dfe6e8; --paper: #14191b; --line: #344045; --head: #1e272a; --mark: #6fc0d9; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper); max-width: 76rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1, h2 { line-height: 1.25; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--head); white-space: nowrap; } tr:hover td { background: var(--head); }
td strong { color: var(--mark); }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
img { max-width: 100%; background: #ffffff; border-radius: 6px; padding: .4rem; box-sizing: border-box; }
"""


def page(markdown, folder):
    """The page's text. `folder` has the markdown's pictures; missing ones are left out."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    title = "gdsdata bench"
    for place, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h1":
            title = tokens[place + 1].content
        for picture in [one for one in token.children or [] if one.type == "image"]:
            picture.attrs["src"] = embedded(Path(folder) / str(picture.attrs["src"]))
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def embedded(picture):
    """A data URI; "" for a missing file, so that the page does not ask for it."""
    try:
        content = picture.read_bytes()
    except OSError:
        return ""
    kind = mimetypes.guess_type(picture.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
