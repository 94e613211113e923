"""`Staging`: host memory of bounded size that states pass through on their way to files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from gdsdata.checkpoint.partial_pages import PAGE_BYTES
from gdsdata.errors import BackendUnavailable, DeviceError
from gdsdata.io.budget import share_bytes, usable_cores
from gdsdata.io.captures import beside_captures
from gdsdata.io.engine import warn_once
from gdsdata.io.memory import paged_memory, pinned_memory

# Several are written at a time, and a small state does not take much. A pinned buffer is registered
# at once, and the driver serves no other thread meanwhile.
_PIECE_BYTES = 32 << 20
# Threads that make pinned buffers for a save that waits. The driver serves one at a time, but they
# allocate pages side by side.
_MOST_MAKERS = 8
# In the background, a pause is so many times as long as the buffer before it took.
_PAUSES_PER_BUFFER = 8.0
# A smaller state on the CPU is not prepared for: touching its pages takes less time than a thread.
_LEAST_PREPARED_BYTES = 1 << 20


class Staging:
    """Buffers for pieces. Any thread may call it.

    They are made when they are first needed, or before by `prepare`, and kept for later pieces.
    From the first state with tensors on a GPU on, they are pinned, and those that are not are
    freed. It owns the threads that make them in advance; `stop` ends these.

    Args:
        most_bytes: of all buffers together; at least one page is used.

    Attributes:
        piece_bytes: the size of a buffer.
    """

    def __init__(self, most_bytes: int) -> None:
        self.piece_bytes = min(_PIECE_BYTES, max(most_bytes // 2 // PAGE_BYTES, 1) * PAGE_BYTES)
        self._most = max(most_bytes // self.piece_bytes, 1)
        self._changed = threading.Condition()  # guards everything below
        self._spare: list[torch.Tensor] = []
        self._made = 0  # buffers, and those that are being made
        self._device: torch.device | None = None  # the GPU whose driver pins; None: nothing is pinned
        self._pinned: set[int] = set()  # addresses
        self._wanted_bytes = 0  # until the buffers have so many, threads make more
        self._makers = 0  # these threads
        self._making = 0  # buffers that they are making now
        self._hurries = False  # a save waits for them
        self._stopped = False

    def prepare(self, size_bytes: int, device: torch.device | None) -> None:
        """Make buffers for a state in the background, slowly. Returns at once.

        At most half of the memory that the machine has left is taken so, divided among its ranks.

        Args:
            size_bytes: of the state in its file.
            device: a GPU that the state has tensors on, if there is one.
        """
        if device is None and size_bytes < _LEAST_PREPARED_BYTES:
            return
        size_bytes = min(size_bytes, share_bytes())
        with self._changed:
            self._pin_for(device)
            self._wanted_bytes = max(self._wanted_bytes, size_bytes)
            self._start_makers(1)

    def expect(self, size_bytes: int, device: torch.device | None, hurries: bool = True) -> None:
        """Say that `take` is about to be called for a state.

        Args:
            size_bytes, device: as for `prepare`.
            hurries: if there are too few pinned buffers, several threads make them as fast as
                possible. False: nobody waits for the state, so `take` makes them.
        """
        with self._changed:
            self._pin_for(device)
            if not hurries:
                return
            lacking = -(-size_bytes // self.piece_bytes) - len(self._spare) - self._making
            if self._device is None or lacking <= 0:
                return
            self._wanted_bytes = max(self._wanted_bytes, (self._made + lacking) * self.piece_bytes)
            self._hurries = True
            self._changed.notify_all()
            self._start_makers(min(_MOST_MAKERS, usable_cores(), lacking))

    def take(self, is_cancelled: Callable[[], bool], before_waiting: Callable[[], object]) -> torch.Tensor | None:
        """Wait for a buffer.

        Args:
            ``is_cancelled``: called repeatedly; if it returns True, the wait ends.
            before_waiting: called before each wait for a buffer that is in use.

        Returns:
            The buffer; None if ``is_cancelled`` returned True.
        """
        with self._changed:
            while not is_cancelled():
                if self._spare:
                    return self._spare.pop()
                is_coming = self._device is not None and self._making > 0
                if self._made < self._most and not is_coming:
                    self._made += 1
                    device = self._device
                    break
                if not is_coming:
                    before_waiting()
                self._changed.wait(0.05)
            else:
                return None
        try:
            return self._make(device, 0)
        except BaseException:
            with self._changed:
                self._made -= 1
            raise

    def release(self, buffer: torch.Tensor) -> None:
        """Make a buffer free for others."""
        with self._changed:
            if self._device is None or buffer.data_ptr() in self._pinned:
                self._spare.append(buffer)
            else:
                self._made -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """End the threads that make buffers, each after the buffer that it is making.

        Buffers are then made only when they are needed.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until these threads have ended, and free the buffers that are not in use."""
        self.stop()
        with self._changed:
            self._changed.wait_for(lambda: self._makers == 0, 5.0)
            self._made -= len(self._spare)
            self._spare = []

    @property
    def size_bytes(self) -> int:
        """How much memory has been allocated."""
        return self._made * self.piece_bytes

    def _pin_for(self, device: torch.device | None) -> None:
        if device is not None and self._device is None:
            self._device = device
            self._made -= len(self._spare)
            self._spare = []

    def _start_makers(self, most: int) -> None:
        most = min(most, self._lacking())
        while self._makers < most and not self._stopped:
            maker = threading.Thread(target=self._make_in_advance, name="gdsdata-staging", daemon=True)
            try:
                maker.start()
            except RuntimeError:  # no thread is available, so `take` makes buffers
                return
            self._makers += 1

    def _lacking(self) -> int:
        """Return how many buffers are wanted and neither made nor being made."""
        return min(self._most, -(-self._wanted_bytes // self.piece_bytes)) - self._made

    @beside_captures()
    def _make_in_advance(self) -> None:
        """Make buffers until there are as many as wanted. Runs in a thread of its own."""
        while (reserved := self._reserve()) is not None:
            started = time.perf_counter()
            try:
                self._add(self._make(*reserved), reserved[0])
            except Exception as error:
                self._give_up()
                warn_once(f"staging memory could not be made in advance ({error}): save() makes it")
                return
            pause_s = _PAUSES_PER_BUFFER * (time.perf_counter() - started)
            with self._changed:
                self._changed.wait_for(lambda: self._hurries or self._stopped, pause_s)

    def _reserve(self) -> tuple[torch.device | None, int] | None:
        """Count one more buffer as being made.

        Returns:
            The GPU that it is for, and how many bytes of it to touch; None if this thread is not
            needed any more.
        """
        with self._changed:
            lacking = self._lacking()
            if lacking <= 0:
                self._hurries = False
            if self._stopped or lacking <= 0 or (self._makers > 1 and not self._hurries):
                self._makers -= 1
                self._changed.notify_all()
                return None
            needed_bytes = min(self._wanted_bytes - self._made * self.piece_bytes, self.piece_bytes)
            self._made += 1
            self._making += 1
            return self._device, needed_bytes

    def _make(self, device: torch.device | None, touched_bytes: int) -> torch.Tensor:
        if device is None:
            return paged_memory(self.piece_bytes, touched_bytes)
        try:
            buffer = pinned_memory(self.piece_bytes, device)
        except (DeviceError, BackendUnavailable):
            buffer = torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=True)
        with self._changed:
            self._pinned.add(buffer.data_ptr())
        return buffer

    def _add(self, buffer: torch.Tensor, device: torch.device | None) -> None:
        with self._changed:
            self._making -= 1
            if device == self._device:
                self._spare.append(buffer)
            else:  # a state on a GPU has come meanwhile
                self._made -= 1
            self._changed.notify_all()

    def _give_up(self) -> None:
        with self._changed:
            self._makers -= 1
            self._making -= 1
            self._made -= 1
            self._wanted_bytes = 0
            self._changed.notify_all()
