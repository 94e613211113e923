"""`SaveHandle`: what `AsyncCheckpointer.save` returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future


class SaveHandle:
    """A save that is in progress, or has ended. Any thread may use it.

    Attributes:
        step: the step that is saved.
        bytes: the size of what this rank saves.
        stall_s: how long `AsyncCheckpointer.save` kept its caller, in seconds.
    """

    def __init__(
        self,
        step: int,
        size_bytes: int,
        ended: Future[str],
        seen: Callable[[], None],
        uploaded: Future[str] | None = None,
        copied: Future[bool] | None = None,
    ) -> None:
        self.step = step
        self.bytes = size_bytes
        self.stall_s = 0.0
        self._ended, self._seen, self._uploaded, self._copied = ended, seen, uploaded, copied

    def __repr__(self) -> str:
        state = "under way"
        if self._ended.done():
            error = None if self._ended.cancelled() else self._ended.exception()
            state = f"failed: {error!r}" if error else "complete"
        return f"SaveHandle(step={self.step}, {self.bytes} bytes, {state})"

    def done(self) -> bool:
        """Return whether the save has ended, complete or failed."""
        return self._ended.done()

    def result(self, timeout_s: float | None = None) -> str:
        """Wait until the checkpoint is complete and on storage.

        Args:
            timeout_s: how long to wait, in seconds; None: until the save ends.

        Returns:
            The checkpoint's folder.

        Raises:
            TimeoutError: the save has not ended after ``timeout_s``.
            IoError, SaveAborted: the save failed; see `AsyncCheckpointer.save`.
        """
        try:
            return self._ended.result(timeout_s)
        finally:
            if self._ended.done():
                self._seen()

    def upload_done(self) -> bool:
        """Return whether the upload has ended: complete, failed or skipped."""
        return self._uploaded is None or self._uploaded.done()

    def upload_result(self, timeout_s: float | None = None) -> str:
        """Wait until the checkpoint is uploaded.

        Args:
            timeout_s: how long to wait, in seconds; None: until the upload ends.

        Returns:
            The checkpoint's URL.

        Raises:
            ValueError: the `AsyncCheckpointer` has no ``upload``.
            TimeoutError: the upload has not ended after ``timeout_s``.
            SaveAborted: it was skipped, because saves come faster than the store takes them.
            PermissionError, IoError, ...: it failed, or the save did.
        """
        if self._uploaded is None:
            raise ValueError("this checkpoint is not uploaded: construct AsyncCheckpointer with upload=")
        return self._uploaded.result(timeout_s)

    def copied(self, timeout_s: float | None = None) -> bool:
        """Wait until all ranks have their copies of the state in memory, or will not get them.

        Args:
            timeout_s: how long to wait, in seconds; None: until it is known.

        Returns:
            Whether every rank's file is in the memory of its node, and of its partner's if there
            are several nodes. If it is not, a warning on the first rank has said why.

        Raises:
            ValueError: the `AsyncCheckpointer` has no ``peers``.
            TimeoutError: it is not known after ``timeout_s``.
        """
        if self._copied is None:
            raise ValueError("no copies are kept in memory: construct AsyncCheckpointer with peers=1")
        return self._copied.result(timeout_s)
