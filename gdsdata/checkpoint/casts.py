"""`tensors_cast`: new tensors of a file, floating-point ones in another dtype.

On the CPU, the engine casts most of them while it reads. Others are in memory in the dtype of the
file until they are cast. So tensors are read some at a time, and the next ones are read while the
last ones are cast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gdsdata.checkpoint.record_checksums import is_compared
from gdsdata.checkpoint.stored import Record, Stored
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.tensor_rows import overlapping
from gdsdata.checkpoint.tree import Path
from gdsdata.io.captures import wait_for_streams
from gdsdata.io.new_memory import new_tensor
from gdsdata.progress_bars import current

# A round of casts reads at most so much, or one larger tensor, or one larger record whose checksum
# is compared. Two rounds are in memory at a time.
ROUND_BYTES = 256 << 20
_ROUNDS_AT_A_TIME = 2


def tensors_cast(
    stored: dict[Path, Stored],
    dtype: torch.dtype,
    device: torch.device,
    make_reader: Callable[[], TensorReader],
    verify: bool,
    at_once: bool,
) -> dict[Path, torch.Tensor]:
    """Read tensors, and cast floating-point ones to ``dtype`` on ``device``.

    Floating-point tensors of the same place in the file are one tensor. All else is as of
    `TensorReader.tensors`.

    Args:
        stored: where they lie, by their paths.
        dtype: of the result.
        device: of the result.
        make_reader: makes the reader of one round.
        verify: the readers compare checksums.
        at_once: in one round, as ranks read that share what they want.

    Raises:
        Exception: as of `TensorReader.run`.

    Stream semantics: the values are in place when this returns, for every stream.
    """
    rounds = [_Round(stored, 0)] if at_once else list(_rounds(stored, dtype, verify))
    bar = current()
    bar.expect(sum(one.size_bytes for one in rounds))
    made: dict[Path, torch.Tensor] = {}
    under_way: deque[tuple[dict[Path, Stored], TensorReader, dict[Path, torch.Tensor]]] = deque()
    try:
        for part, size_bytes in rounds:
            reader, read = make_reader(), dict[Path, torch.Tensor]()
            under_way.append((part, reader, read))
            read |= _collected(reader, part, dtype, device)
            bar.expect(-size_bytes)  # the reader expects them
            reader.begin()
            if len(under_way) == _ROUNDS_AT_A_TIME:
                made |= _cast(*under_way.popleft(), dtype)
        while under_way:
            made |= _cast(*under_way.popleft(), dtype)
    finally:
        for _, reader, _ in under_way:
            reader.cancel()
    wait_for_streams({device})
    return made


class _Round(NamedTuple):
    """Tensors that are read at once.

    Attributes:
        tensors: by their paths.
        size_bytes: how much of the file has them, with the gaps between the rows of views.
    """

    tensors: dict[Path, Stored]
    size_bytes: int


def _rounds(stored: dict[Path, Stored], dtype: torch.dtype, verify: bool) -> Iterator[_Round]:
    """Yield those that stay as they are, and then the others, some at a time.

    Those that share bytes are in one round, and those of a record whose checksum is compared.
    """
    kept = {place: one for place, one in stored.items() if not _is_cast(one.dtype, dtype)}
    if kept:
        yield _Round(kept, sum(one.span_bytes for one in kept.values()))
    part: dict[Path, Stored] = {}
    size_bytes, last = 0, Record(None, 0, 0)
    for group in overlapping({place: one for place, one in stored.items() if place not in kept}):
        record = group[0][1].record
        begin, end = group[0][1].offset, max(one.offset + one.span_bytes for _, one in group)
        belongs = verify and record == last and is_compared(record)
        if part and not belongs and size_bytes + end - begin > ROUND_BYTES:
            yield _Round(part, size_bytes)
            part, size_bytes = {}, 0
        part.update(group)
        size_bytes, last = size_bytes + end - begin, record
    if part:
        yield _Round(part, size_bytes)


def _collected(
    reader: TensorReader, part: dict[Path, Stored], dtype: torch.dtype, device: torch.device
) -> dict[Path, torch.Tensor]:
    """Have tensors read, and cast meanwhile if the reader can."""
    converted = {one for one in part.values() if reader.conversion_of(one, dtype, device) is not None}
    made: dict[Path, torch.Tensor] = {}
    for group in overlapping(part) if converted else ():
        path, stored = group[0]
        if stored in converted and all(one == stored for _, one in group):
            tensor = new_tensor(stored.shape, None, dtype, device)
            reader.tensor_into(tensor, stored, path)
            made |= dict.fromkeys((place for place, _ in group), tensor)
    return made | reader.tensors({path: one for path, one in part.items() if path not in made}, device)


def _cast(
    part: dict[Path, Stored], reader: TensorReader, read: dict[Path, torch.Tensor], dtype: torch.dtype
) -> dict[Path, torch.Tensor]:
    """Wait for a round's reads, and return its tensors in their dtypes."""
    reader.run()
    made: dict[Path, torch.Tensor] = {}
    casts: dict[Stored, torch.Tensor] = {}  # tied tensors stay tied
    for place, one in part.items():
        tensor = read.pop(place)
        if one.dtype.is_floating_point:
            if one not in casts:
                casts[one] = tensor.to(dtype)
            tensor = casts[one]
        made[place] = tensor
    return made


def _is_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored.is_floating_point and stored != wanted
