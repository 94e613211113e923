"""A live view of the processes that use gdsdata: what `python -m gdsdata.top` shows.

A process exports its numbers if ``GDSDATA_TOP=1`` is in its environment, from its first engine on,
or from `start` on. It then has one daemon thread, which waits at a Unix socket. The thread answers
each connection with a snapshot as JSON (docs/guide/top.md has its fields), and ends it. A process
that does not export has neither thread nor socket, and does not import this package.
"""

from __future__ import annotations

__all__ = ["start", "stop"]


def start() -> bool:
    """Export this process's numbers to `gdsdata.top`. May be called again.

    A forked child exports its own from its first engine on, if ``GDSDATA_TOP`` is set, or if it
    calls this.

    Returns:
        Whether they are exported. If they are not, a warning has said why.
    """
    from gdsdata.observe.live import exporter  # it imports the engine; the reader of snapshots does not

    return exporter.start()


def stop() -> None:
    """End the export of this process, and remove its socket. May be called again."""
    from gdsdata.observe.live import exporter

    exporter.stop()
