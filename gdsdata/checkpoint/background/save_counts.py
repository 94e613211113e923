"""`SaveCounts`: what `gdsdata.top` shows of an `AsyncCheckpointer`."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gdsdata.observe import counted

if TYPE_CHECKING:
    from gdsdata.checkpoint.background.uploads import Uploads


class SaveCounts:
    """Counts the saves into a folder, and their bytes. Any thread may call it.

    Args:
        folder: of the checkpoints.
        uploads: of complete checkpoints; None: there are none.
    """

    def __init__(self, folder: str = "", uploads: Uploads | None = None) -> None:
        self._folder, self._uploads = folder, uploads
        self._lock = threading.Lock()  # guards everything below
        self._step: int | None = None  # that was begun last
        self._counted = {"begun": 0, "complete": 0, "failed": 0, "stall_s": 0.0}
        self._bytes = {"begun_bytes": 0, "staged_bytes": 0, "written_bytes": 0}
        if folder:
            counted.saves.add(self)

    def begin(self, step: int, size_bytes: int, ended: Future[Any]) -> None:
        """Count a save that has begun.

        Args:
            step: the step. size_bytes: of all storages.
            ended: has the result of the save.
        """
        with self._lock:
            self._step = step
            self._counted["begun"] += 1
            self._bytes["begun_bytes"] += size_bytes
        ended.add_done_callback(self._ended)

    def staged(self, size_bytes: int) -> None:
        """Count bytes that were copied into staging memory."""
        with self._lock:
            self._bytes["staged_bytes"] += size_bytes

    def written(self, size_bytes: int) -> None:
        """Count bytes of staging memory that were written."""
        with self._lock:
            self._bytes["written_bytes"] += size_bytes

    def stalled(self, seconds: float) -> None:
        """Count the time in which a save blocked its caller."""
        with self._lock:
            self._counted["stall_s"] += seconds

    def _ended(self, ended: Future[Any]) -> None:
        failed = ended.cancelled() or ended.exception() is not None
        with self._lock:
            self._counted["failed" if failed else "complete"] += 1

    def counters(self) -> counted.Counters:
        """Return what only rises."""
        with self._lock:
            found: counted.Counters = {**self._counted, **self._bytes}
        found["uploaded_bytes"] = 0 if self._uploads is None else self._uploads.sent_in_all_bytes
        return found

    def gauges(self) -> dict[str, Any]:
        """Return what is so at this moment."""
        upload = None
        if self._uploads is not None:
            status = self._uploads.status
            upload = {"step": status.step, "waiting": len(status.waiting), "newest_step": status.newest_step}
        return {"folder": self._folder, "step": self._step, "upload": upload}
