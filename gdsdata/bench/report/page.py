"""report.html: report.md as one page with its pictures, light or dark."""

import base64
import mimetypes
from pathlib import Path

from gdsdata.bench.report.layout import rendered


def page(markdown, folder):
    """Return the page; `folder` has its pictures, of which missing ones are left out."""
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
    return rendered(Path(__file__).with_name("page.jinja"), title=title, body=body)


def embedded(picture):
    """Return a data URI; "" for a missing file, so that the page does not ask for it."""
    try:
        content = picture.read_bytes()
    except OSError:
        return ""
    kind = mimetypes.guess_type(picture.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
