"""Helpers of the tests of MDS and LitData: shards by hand, fields read back, and damage."""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdsdata.formats import stretch_reader
from gdsdata.formats.fields import FieldIndex


def pack_sample(columns: Sequence[bytes], carries_size: Sequence[bool]) -> bytes:
    """Join the sizes of those columns that carry theirs, and then the columns."""
    sizes = [len(column) for column, carries in zip(columns, carries_size, strict=True) if carries]
    return np.array(sizes, "<u4").tobytes() + b"".join(columns)


def pack_shard(samples: Sequence[bytes], config: bytes = b"") -> bytes:
    """Join the number of samples, their offsets, the format's own bytes, and the samples."""
    ends = np.cumsum([4 * (len(samples) + 2) + len(config), *map(len, samples)])
    return np.array([len(samples), *ends], "<u4").tobytes() + config + b"".join(samples)


class Opens:
    """The opens of shards whose samples are looked at, each of which may wait as on a network."""

    def __init__(self, monkeypatch, wait_s: float) -> None:
        self.paths: list[str] = []
        self.threads: set[int] = set()
        open_file = stretch_reader.open_file

        def slow_open(path: str, at_random: bool) -> Any:
            self.paths.append(path)
            self.threads.add(threading.get_ident())
            time.sleep(wait_s)
            return open_file(path, at_random)

        monkeypatch.setattr(stretch_reader, "open_file", slow_open)


def read_column(index: FieldIndex, name: str, samples: Sequence[int] | None = None) -> list[Any]:
    """Read a field of some samples by its extents alone, as an engine would: arrays, or bytes."""
    samples = np.arange(len(index)) if samples is None else np.asarray(samples)
    plan = index.plan(samples)
    shape = (-1, len(index.fields))
    files, begin, length = plan.source.reshape(shape)[:, 0], plan.offset.reshape(shape), plan.length.reshape(shape)
    assert files.dtype == np.int32 and begin.dtype == length.dtype == np.int64
    place = [field.name for field in index.fields].index(name)
    field = index.fields[place]
    values = []
    for file, offset, count in zip(files, begin[:, place], length[:, place], strict=True):
        with open(index.paths[file], "rb") as stream:
            stream.seek(offset)
            data = stream.read(count)
        assert len(data) == count
        if field.dtype is not None:
            data = np.frombuffer(data, field.dtype)
            data = data if field.shape is None else data.reshape(field.shape)
        values.append(data)
    return values


def same(got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether the arrays are the same in number, dtype, shape and every byte."""
    arrays = [np.asarray(value) for value in expected]
    return len(got) == len(arrays) and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in zip(got, arrays, strict=True)
    )


def assert_within_files(index: FieldIndex) -> None:
    """Check that extents lie in their files, in the order of fields, and files have their sizes."""
    plan, shape = index.plan(np.arange(len(index))), (-1, len(index.fields))
    files, begin, length = plan.source.reshape(shape)[:, 0], plan.offset.reshape(shape), plan.length.reshape(shape)
    size = np.array([os.path.getsize(path) for path in index.paths])
    assert (size == index.size_bytes).all()
    assert (begin >= 0).all() and (length >= 0).all()
    assert (begin + length <= size[files][:, None]).all()
    assert (begin[:, 1:] >= (begin + length)[:, :-1]).all()


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Write the file's object as ``change`` leaves or returns it."""
    content = json.loads(path.read_text())
    result = change(content)
    path.write_text(json.dumps(content if result is None else result))


def set_at(way: Sequence[Any], value: Any) -> Callable[[Any], None]:
    """For `edit_json`: put ``value`` where ``way`` leads. ``...`` removes what is there."""

    def change(content: Any) -> None:
        for key in way[:-1]:
            content = content[key]
        if value is ...:
            del content[way[-1]]
        else:
            content[way[-1]] = value

    return change


def mutations(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield ``count`` damaged versions of ``data``.

    Bytes are changed, numbers made large, and parts cut out, doubled or cut off.
    """
    chance = random.Random(seed)
    for _ in range(count):
        damaged = bytearray(data)
        place, kind = chance.randrange(len(data)), chance.randrange(5)
        if kind == 0:
            damaged[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            damaged[place : place + 4] = chance.choice([b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80", b"9999"])
        elif kind == 2:
            del damaged[place : place + chance.randrange(1, 9)]
        elif kind == 3:
            damaged[place:place] = data[place : place + chance.randrange(1, 9)]
        else:
            del damaged[place:]
        yield bytes(damaged)


def outcomes_of_damage(
    file: Path, seed: int, size_at: Sequence[Any], read: Callable[[], FieldIndex], count: int = 300
) -> set[str]:
    """Read `mutations` of ``file``, and return "read" or the error's class for each.

    "read" means that the extents lie within their files.

    Args:
        file: a shard or index.json.
        seed: of the damage.
        size_at: where index.json has the size of that shard. It is kept true, because a wrong size
            would hide all other damage.
        read: index the dataset.
        count: of mutations.
    """
    outcomes = set()
    for damaged in mutations(file.read_bytes(), seed, count):
        file.write_bytes(damaged)
        if file.name != "index.json":
            edit_json(file.parent / "index.json", set_at(size_at, len(damaged)))
        try:
            assert_within_files(read())
            outcomes.add("read")
        except (ValueError, FileNotFoundError) as error:
            outcomes.add(type(error).__name__)
    return outcomes
