"""Elements of SVG for the pictures of the documentation, with colors that follow light and dark.

A picture stands alone in a viewer of Markdown, where it follows the system's setting. In the site
it is part of the page, and docs/site/static/site.css has it follow the page's switch.
"""

from html import escape

WIDTH = 430
COLORS = {  # {name: (light, dark)}
    "ink": ("#1b2430", "#e4e8ee"),
    "muted": ("#566274", "#a3afbf"),
    "accent": ("#0f6ab4", "#5db0f5"),
    "soft": ("#d7e6f5", "#1f3a57"),
    "other": ("#aab6c5", "#5b6878"),
    "line": ("#c3ccd8", "#485464"),
    "paper": ("#ffffff", "#171b21"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def style(more: str = "") -> str:
    """Return the picture's style sheet: a class `name` fills with a color, `name-line` draws."""
    light = ";".join(f"--{name}:{pair[0]}" for name, pair in COLORS.items())
    dark = ";".join(f"--{name}:{pair[1]}" for name, pair in COLORS.items())
    fills = "".join(f".drawn .{name}{{fill:var(--{name})}}" for name in COLORS)
    lines = "".join(f".drawn .{name}-line{{stroke:var(--{name});fill:none}}" for name in COLORS)
    return (
        f"<style>.drawn{{{light};font-family:{FONT}}}@media(prefers-color-scheme:dark){{.drawn{{{dark}}}}}"
        f"{fills}{lines}{more}</style>"
    )


def picture(height: float, parts: list[str], says: str, more_style: str = "") -> str:
    """Return a whole picture, and what it says in words for those who do not see it."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" viewBox="0 0 {WIDTH} {height:g}">\n'
        f"<desc>{escape(says)}</desc>\n{style(more_style)}\n{body}\n</svg>\n"
    )


def text(
    x: float, y: float, words: str, color: str = "ink", size: float = 13, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" class="{color}" font-size="{size:g}"{at}{weight}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, color: str, radius: float = 3) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{color}"/>'


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.5, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{color}-line" stroke-width="{width:g}"{dashed}/>'
