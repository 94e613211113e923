"""`identity_of` describes a data set's data; a state is resumed with no other.

An index says everything that batches are made from: which bytes of which files are which sample,
and of what dtype, shape and fields. So data is the same if the index is, and the files have the
same names and sizes. Contents are not looked at. Folders may have moved: names count from the
folder that all files have in common.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from gdsdata.data.split import Split
from gdsdata.formats.extents import Extents
from gdsdata.formats.index import Format, SampleIndex
from gdsdata.formats.unpacking import is_unpacked
from gdsdata.io.engine import unsigned_url, warn_once
from gdsdata.storage.urls import have_urls, without_query

_DIGEST_BYTES = 8
# A key of a state, and its name in arguments.
_NAMES = {"samples_per_step": "batch_size * world_size"}
# These only say in words what differs. All that they mean is in the index.
_NOT_COMPARED = ("format", "split")
# These attributes of an index say nothing of its samples. Names and sizes have digests of their
# own, and copies of files have times of their own. ``files`` (which pyarrow needs to read a table)
# follows from the rest.
_NOT_OF_SAMPLES = ("paths", "size_bytes", "mtime_ns", "files")


def identity_of(index: SampleIndex, format: Format, split: Split) -> dict[str, Any]:
    """Return what distinguishes this data from other data: numbers and strings.

    It reads all of the index, 0.4 s for ten million samples with two fields, so keep what it
    returns.

    Args:
        index: of the samples.
        format: that made the index. It is recorded to say what differs, and is not compared: its
            arguments may be spelled in several ways, and all that they mean is in the index.
        split: part of the source. Its name is compared, because the files of two splits can have
            equal names and sizes; its bounds are as ``format``.
    """
    names = relative_names(index.paths)
    return {
        "format": described(format),
        "split": [split.begin, split.end],
        **({} if split.name is None else {"split_name": split.name}),
        "files": len(names),
        "bytes": int(index.size_bytes.sum()),
        "first_file": names[0],
        "names": _digest(os.fsencode("\0".join(names))),
        "sizes": _digest(index.size_bytes),
        "index": _digest(*_parts_of(index)),
    }


def compared(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that is equal if and only if the data are."""
    return {key: value for key, value in identity.items() if key not in _NOT_COMPARED}


def refuse_other(state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a state that cannot be resumed here.

    Raises:
        ValueError: a state is of another data set or order than the one that ``now`` describes;
            what differs is named.
    """
    different = [key for key in now if key != "data" and state.get(key) != now[key]]
    said = [f"{_NAMES.get(key, key)} was {state.get(key)!r} and is {now[key]!r}" for key in different]
    if "data" in state:
        said = differences(state["data"], now["data"]) + said
    elif not said:
        warn_once(
            "a state of an earlier version was loaded: it only says how many samples its data have, so check them"
        )
    if said:
        raise ValueError(f"the state is of another data set or order, and cannot be resumed here: {'; '.join(said)}")


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two identities in words; empty if they agree."""
    found = []
    names = then.get("split_name"), now.get("split_name")
    if names[0] != names[1] and None not in names:  # without a name, the split's own folder may be the source
        found.append(f"the split was {names[0]!r} and is {names[1]!r}")
    if any(then.get(key) != now[key] for key in ("files", "names", "sizes")):
        keys = ("files", "bytes", "first_file")
        said = ["{} of {} bytes, {!r} first".format(*map(one.get, keys)) for one in (then, now)]
        which = "names" if then.get("names") != now["names"] else "sizes"
        again = f" (their {which} differ)" if said[0] == said[1] else ""
        found.append(f"the files were {said[0]}, and are {said[1]}{again}")
    if then.get("index") != now["index"]:
        in_words = [
            f"{key} was {then.get(key)} and is {now[key]}" for key in _NOT_COMPARED if then.get(key) != now[key]
        ]
        if in_words or not found:
            found += in_words or ["the samples lie at other places in the files than they did"]
    return found


def relative_names(paths: Sequence[str]) -> list[str]:
    """Return the files' names from the folder on that they have in common.

    A signature in a URL does not count: it is a secret, and another one at the next start. The rest
    of a query may name the object, or be a secret too, so its digest counts. A shard that was
    unpacked (`formats.unpacking`) lies under a name that depends on its folder: it counts without
    one.
    """
    if have_urls(paths):
        paths = list(map(_without_secrets, paths))
    named = [path for path in paths if not is_unpacked(path)]
    if not named:
        return ["(unpacked)"] * len(paths)
    # A folder that the first and the last in the order of names have in common is all files'.
    first, last = min(named).split("/")[:-1], max(named).split("/")[:-1]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    begin = sum(len(part) + 1 for part, _ in same)
    return ["(unpacked)" if is_unpacked(path) else path[begin:] for path in paths]


def _without_secrets(path: str) -> str:
    if (plain := without_query(path)) == path:
        return path
    query = unsigned_url(path)[len(plain) :]
    return plain + ("?" + hashlib.sha256(query.encode()).hexdigest()[:16] if query else "")


def described(format: Format) -> str:
    """Describe a format and its arguments; its class alone if it is no dataclass."""
    return _brief.repr(format) if is_dataclass(format) else type(format).__qualname__


class _Brief(reprlib.Repr):
    def repr_instance(self, x: object, level: int) -> str:
        said = repr(x)
        return said if len(said) <= 200 else f"{said[:150]}...{said[-40:]}"


_brief = _Brief()


def _parts_of(index: SampleIndex) -> Iterator[bytes | np.ndarray]:
    yield index.kind.encode()
    yield from _attributes_of(index)


def _attributes_of(part: SampleIndex | Extents) -> Iterator[bytes | np.ndarray]:
    for field in fields(part):
        if field.name not in _NOT_OF_SAMPLES:
            value = getattr(part, field.name)
            yield field.name.encode()
            if isinstance(value, Extents):  # equal if and only if its attributes are
                yield from _attributes_of(value)
            else:
                yield value if isinstance(value, np.ndarray) else _spelled(value).encode()


def _spelled(value: object) -> str:
    """Spell a sample or fields alike on every machine and with every version of numpy.

    Attributes that are not compared are left out. Older versions did not have them.
    """
    if isinstance(value, np.dtype):
        return value.str
    if isinstance(value, tuple):
        return f"({','.join(map(_spelled, value))})"
    if is_dataclass(value):
        compared_ones = (field.name for field in fields(value) if field.compare)
        return f"{{{','.join(f'{name}={_spelled(getattr(value, name))}' for name in compared_ones)}}}"
    return str(value)


def _digest(*parts: bytes | np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype.str}{part.shape}".encode())
            if part.size:
                found.update(np.ascontiguousarray(part).view(np.uint8).reshape(-1).data)
        else:
            found.update(part)
        found.update(b"\0")
    return found.hexdigest()
