"""`ReadAhead`: the tensors of a file one by one, with those that a loop asks for next."""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.safetensors.numbered_names import by_numbers
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.urls import is_url
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.io.options import EngineOptions
from gdsdata.storage.regular import read_resident

# A tensor up to this size is read by the calling thread, if the page cache has it. A loop over 500
# MB in 300 tensors then took 0.06 s of CPU time, and 0.18 s by the engine (two cores, 2026-11-26).
# Longer ones are copied by several threads.
_SHORT_BYTES = 8 << 20
# The same for a part of a tensor, by the bytes from its first to its last one. Columns that span 1
# MiB took 81 us so, and 202 by the engine. Half of the columns of 8 MiB took 1687, and 655 (two
# cores, 2026-11-28).
_SHORT_PART_BYTES = 1 << 20
# Batches that are read ahead grow to this size. Two of them are in memory.
# Memory that was just freed is used again, so short batches take less CPU time. That loop took 0.15
# s from the disk with 16 MiB, and 0.20 s with 64 MiB, and no longer.
_MOST_BYTES = 16 << 20
# The same for GPUs and objects, where a batch costs a round trip.
_MOST_BYTES_FAR = 64 << 20
_FIRST_BYTES = 4 << 20
# Threads that share a loop ask for its tensors in nearly the loop's order.
_NEAR = 8
# The last names, by which an order is known.
_MOST_ASKED = 64
# The errors of file systems that do not know RWF_NOWAIT.
_CANNOT_SAY = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class ReadAhead:
    """Reads tensors by name. Any thread may call it.

    If names come in a known order, the tensors that follow are read before they are asked for. They
    take at most 32 MiB, or 128 MiB on a GPU or from a URL. If tensors are longer, they are two.
    Known orders are those of the names, of the file, and of the names with their numbers counted
    ("layers.2" before "layers.10").

    Args:
        tensors: of the file, by name.
        options: of the engine.
    """

    def __init__(self, tensors: Mapping[str, Stored], options: EngineOptions) -> None:
        self._tensors, self._options = tensors, options
        self._lock = fork_safe_lock()  # guards everything below
        self._process = os.getpid()
        self._orders: list[_Order] = []  # made when needed: those of 20,000 names took a third of a loop
        self._asked: deque[str] = deque(maxlen=_MOST_ASKED)  # not noted by the orders yet, except the first one
        self._ahead = _Ahead()
        self._next_bytes = _FIRST_BYTES
        self._knows_cached = True  # the file system says whether the page cache has a page
        self._is_far = any(is_url(stored.record.path) for stored in itertools.islice(tensors.values(), 1))

    def get(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor of the file in memory of its own.

        Args:
            name: of the tensor.
            device: of the result. A tensor that was read ahead for another one is read again.

        Raises:
            IoError, CorruptData, StallError: as `gdsdata.load`.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """
        with self._lock:
            if self._process != os.getpid():  # reads of a forked child's parent never end here
                self._process = os.getpid()
                self._ahead.clear()
            self._asked.append(name)
            batch, tensor = self._ahead.take(name)
        if batch is None and (cached := self._from_page_cache(self._tensors[name], device)) is not None:
            return cached
        with self._lock:
            order = self._order()
            if batch is None or tensor is None or tensor.device != device:
                self._ahead.clear()
                batch = _Batch({name: self._tensors[name]}, device, self._options)
                tensor = batch.tensors[name]
                if order is not None:
                    order.reached = order.places[name] + 1
            if order is not None:
                self._read_on(order, name, device)
        batch.wait()
        return tensor

    def cached_part(self, stored: Stored, device: torch.device) -> torch.Tensor | None:
        """Return a part of a tensor, as slices are; None if it is long, or not in the page cache.

        Raises:
            CorruptData: the file was changed since it was opened.
        """
        return None if stored.span_bytes > _SHORT_PART_BYTES else self._from_page_cache(stored, device)

    def _from_page_cache(self, stored: Stored, device: torch.device) -> torch.Tensor | None:
        """Return a short tensor of a file for the CPU, if all of it is in the page cache."""
        file, span_bytes = stored.record.file, stored.span_bytes
        if device.type != "cpu" or self._is_far or file is None or not self._knows_cached:
            return None
        if not 0 < span_bytes <= _SHORT_BYTES:
            return None
        has_gaps = span_bytes != stored.size_bytes
        shape = (span_bytes // stored.dtype.itemsize,) if has_gaps else stored.shape
        tensor = torch.empty(shape, dtype=stored.dtype, device=device)
        target = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            offset = stored.record.offset + stored.offset
            got = read_resident(file.file().descriptor, target, offset)
        except OSError as error:  # the engine has its words for an error that is none of these
            self._knows_cached = error.errno not in _CANNOT_SAY
            return None
        file.check_unchanged()
        if got != span_bytes:
            return None
        if not has_gaps:
            return tensor
        of_bytes = tensor.view(torch.uint8) if stored.dtype.itemsize == 1 else tensor  # torch 2.9 copies no float4
        return of_bytes.as_strided(stored.shape, stored.stride).contiguous().view(stored.dtype)

    def close(self) -> None:
        """Drop what was read ahead."""
        with self._lock:
            self._ahead.clear()

    def _order(self) -> _Order | None:
        """Return the order in which the names come; None if they come in none."""
        if not self._orders and len(self._asked) > 1:
            with collector_paused():
                self._orders = list(_orders_of(self._tensors))
        while len(self._asked) > 1:
            last = self._asked.popleft()
            for order in self._orders:
                order.note(last, self._asked[0])
        best = max(self._orders, key=lambda order: order.hits, default=None)
        return best if best is not None and best.hits > 0 else None

    def _read_on(self, order: _Order, name: str, device: torch.device) -> None:
        """Begin the next batch, if less than one is left of those that were begun."""
        place = order.places[name]
        self._ahead.drop_before(place - _NEAR, order)
        order.reached = max(order.reached, place + 1)
        most_bytes = _MOST_BYTES if device.type == "cpu" and not self._is_far else _MOST_BYTES_FAR
        if self._ahead.bytes >= self._next_bytes:
            return
        chosen: dict[str, Stored] = {}
        size_bytes = 0
        while size_bytes < self._next_bytes and order.reached < len(order.names):
            following = order.names[order.reached]
            longer = size_bytes + self._tensors[following].size_bytes
            if chosen and longer > most_bytes:
                break
            order.reached += 1
            if following not in self._ahead:
                chosen[following], size_bytes = self._tensors[following], longer
        if chosen:
            self._ahead.add(_Batch(chosen, device, self._options))
            self._next_bytes = min(2 * self._next_bytes, most_bytes)


class _Batch:
    """Tensors whose reads began when this was made."""

    def __init__(self, wanted: Mapping[str, Stored], device: torch.device, options: EngineOptions) -> None:
        self._reader: TensorReader | None = TensorReader(options, verify=False)
        made = self._reader.tensors({(name,): stored for name, stored in wanted.items()}, device)
        self.tensors = {str(path[0]): tensor for path, tensor in made.items()}
        self._lock = fork_safe_lock()  # one thread at a time ends the reads
        if len(wanted) > 1:
            self._reader.begin()

    def wait(self) -> None:
        """Wait until the tensors have their values. Each call raises the error of the reads."""
        with self._lock:
            if self._reader is not None:
                self._reader.run()
                self._reader = None


class _Ahead:
    """Tensors that were read ahead, with their batches. They are counted: there may be thousands.

    Attributes:
        bytes: of the tensors.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[_Batch, torch.Tensor]] = {}
        self.bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def add(self, batch: _Batch) -> None:
        for name, tensor in batch.tensors.items():
            self._found[name] = batch, tensor
            self.bytes += tensor.nbytes

    def take(self, name: str) -> tuple[_Batch, torch.Tensor] | tuple[None, None]:
        """Remove a tensor and return it; None if it was not read ahead."""
        found = self._found.pop(name, None)
        if found is None:
            return None, None
        self.bytes -= found[1].nbytes
        return found

    def drop_before(self, place: int, order: _Order) -> None:
        """Drop the oldest tensors, as long as their places are before this one."""
        while (oldest := next(iter(self._found), None)) is not None and order.places[oldest] < place:
            self.take(oldest)

    def clear(self) -> None:
        self._found.clear()
        self.bytes = 0


class _Order:
    """One order of the names.

    Attributes:
        names: in this order.
        places: of the names.
        hits: how many names came in this order, without a break.
        reached: the place of the first name that is not read yet.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.places = {name: place for place, name in enumerate(names)}
        self.hits = self.reached = 0

    def note(self, last: str, name: str) -> None:
        step = self.places[name] - self.places[last]
        self.hits = self.hits + (step > 0) if 0 < abs(step) <= _NEAR else 0


def _orders_of(tensors: Mapping[str, Stored]) -> Iterator[_Order]:
    names = sorted(tensors)
    yield _Order(names)
    yield _Order(sorted(tensors, key=lambda name: tensors[name].record.offset))
    numbered = sorted(names, key=by_numbers)
    if numbered != names:
        yield _Order(numbered)
