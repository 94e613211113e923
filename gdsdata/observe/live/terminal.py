"""The live view in a terminal, by rich."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from gdsdata.observe.live.rates import Sampler
from gdsdata.observe.live.sections import nobody, sections

_NEEDS = "a live view in the terminal needs rich ({error}): pip install 'gdsdata[top]', or use --once"


def rich_part(name: str) -> Any:
    """Return a module of rich.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(f"rich.{name}")
    except ImportError as error:
        raise ImportError(_NEEDS.format(error=error)) from error


def drawn(view: Mapping[str, Any]) -> Any:
    """Return a view as something that rich prints."""
    table, text, console = (rich_part(name) for name in ("table", "text", "console"))
    clock = time.strftime("%H:%M:%S", time.localtime(view["time_s"]))
    parts = [text.Text(f"gdsdata.top   {clock}   Ctrl-C ends it", style="dim")]
    for section in sections(view):
        # Without lines and margins, because a terminal may have 24 rows.
        drawing = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for title, left in zip(section.columns, section.is_left, strict=True):
            drawing.add_column(title, justify="left" if left else "right", overflow="ellipsis", no_wrap=True)
        for row in section.rows:
            drawing.add_row(*map(text.Text, row), style="bold" if row[0] == "sum" else None)
        parts += [text.Text(f"\n{section.title}", style="bold"), drawing]
    if len(parts) == 1:
        parts.append(text.Text(nobody(view)))
    return console.Group(*parts)


def watch(sampler: Sampler, every_s: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Show a view again and again, until Ctrl-C.

    Args:
        sampler: takes the views.
        every_s: the time between two of them.
        sleep: waits so long.

    Raises:
        ImportError: rich is not installed.
    """
    live = rich_part("live")
    with live.Live(drawn(sampler.view()), auto_refresh=False, screen=True) as screen:
        try:
            while True:
                sleep(every_s)
                screen.update(drawn(sampler.view()), refresh=True)
        except KeyboardInterrupt:
            return
