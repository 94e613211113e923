"""Errors about a checkpoint, with its path and a remedy.

They are mistakes of users, and errors of torch and pickle.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from gdsdata.checkpoint.tree import leaves, name_of
from gdsdata.checkpoint.urls import plain_path
from gdsdata.errors import CorruptData, GdsdataError
from gdsdata.storage.paths import absolute

P = ParamSpec("P")
T = TypeVar("T")

DCP_METADATA = ".metadata"
_FETCH = "Fetch or save the file again, or load an earlier checkpoint"
# How other files begin that are found under a checkpoint's name: what each is, and the remedy.
_FOREIGN = (
    (b"<", "an HTML or XML page, which a failed download leaves. Fetch the file again"),
    (b"version https://git-lfs", "a Git LFS pointer. Run `git lfs pull`"),
    (b"\x1f\x8b", "compressed by gzip. Unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd. Unpack it first"),
    (b"BZh", "compressed by bzip2. Unpack it first"),
    (b"\xfd7zXZ", "compressed by xz. Unpack it first"),
    (b"GGUF", "a GGUF file, which gdsdata does not read"),
    (b"\x89HDF", "an HDF5 file, which gdsdata does not read"),
    (b"\x93NUMPY", "an array of numpy's. Read it with numpy.load"),
)
ZIP_MAGIC = b"PK\x03\x04"
_TORCH_MAGICS = (ZIP_MAGIC, b"\x80")  # a zip; a pickle, as older versions wrote
_OLDER_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")  # the number that such pickles begin with


def checked_path(path: Any, caller: str) -> str:
    """Return the path of one file, or the URL of an object, as str.

    Args:
        path: what a user gave for it.
        caller: the function that the user called: "load" or "save".

    Raises:
        TypeError: it is not the path of one file.
        ValueError: a ``file://`` URL of another host.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        return plain_path(os.fsdecode(path))
    if isinstance(path, (list, tuple, set)):
        remedy = f"call {caller} for each file, or give the path of a *.safetensors.index.json that names its shards"
    elif hasattr(path, "read") or hasattr(path, "write"):
        remedy = f"give the file's path; torch.{caller} takes file objects"
    else:
        remedy = "give a str or an os.PathLike"
    raise TypeError(f"path={path!r:.100} is of type {type(path).__name__}, and no path of one file: {remedy}")


def _device_in_words(location: Any) -> str:
    if location is None:
        return "leave it out, or write device= if tensors are not for the CPU"
    if isinstance(location, (str, torch.device)):
        return f"write device=, as in device={str(location)!r}"
    return "write device=, the device of all tensors; for a function or a dict, call torch.load"


# Remedies for the arguments of torch.load that gdsdata's has no equal of, by name.
_OF_TORCH_LOAD: dict[str, Callable[[Any], str]] = {
    "map_location": _device_in_words,
    "mmap": lambda _: "leave it out, because bytes go straight into the tensors",
    "pickle_module": lambda _: "leave it out, or call torch.load",
}


def torch_arguments_explained(load: Callable[P, T]) -> Callable[P, T]:
    """Have a TypeError for an argument of torch.load say what to write.

    A decorator of `load`, whose signature stays as it is.
    """

    @functools.wraps(load)
    def checked(*positional: P.args, **named: P.kwargs) -> T:
        for name in named:
            if name in _OF_TORCH_LOAD:
                remedy = _OF_TORCH_LOAD[name](named[name])
                raise TypeError(
                    f"load() got an unexpected keyword argument {name!r}, which is one of torch.load: {remedy}"
                )
        return load(*positional, **named)

    return checked


def no_file(path: str) -> str:
    """Return the message for a file that does not exist."""
    found = glob.glob(path) if glob.has_magic(path) else []
    if found:
        return f"'{path}' is a pattern, which {len(found)} files match. Give the path of one of them, as '{found[0]}'"
    folder = os.path.dirname(path) or "."
    lost = "" if os.path.isdir(folder) else f", and no folder '{folder}'"
    here = "" if os.path.isabs(path) else f" (relative paths begin at '{absolute(os.curdir)}')"
    return f"there is no file '{path}'{lost}. Check the path{here}"


def folder(path: str) -> str:
    """Return the message for a folder that was given in the place of a file."""
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(path))
        if DCP_METADATA in names:
            return f"'{path}' is a folder with a distributed checkpoint. Load it by {_dcp_load(path)}"
        if is_step(path):
            return step_in_words(path)
        if any(name.startswith("step-") for name in names) or "manifest.json" in names:
            return f"'{path}' is a folder of AsyncCheckpointer's. Load it by AsyncCheckpointer(folder).restore(state)"
        for ending in (".safetensors.index.json", ".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
            found = [name for name in names if name.endswith(ending)]
            if found:
                return f"'{path}' is a folder. Give the path of a file in it, as '{os.path.join(path, found[0])}'"
    return f"'{path}' is a folder, and in it is nothing that looks like a checkpoint. Give the path of a file"


def dcp_file(path: str) -> CorruptData:
    """Return the error for one file of a distributed checkpoint: of its data, or the metadata."""
    load = _dcp_load(os.path.dirname(path) or ".")
    what = "the metadata" if os.path.basename(path) == DCP_METADATA else "a data file"
    return CorruptData(f"'{path}' is {what} of a distributed checkpoint. Load its folder by {load}", path)


def _dcp_load(folder: str) -> str:
    return f"torch.distributed.checkpoint.load(..., storage_reader=gdsdata.GDSStorageReader({folder!r}))"


def is_step(folder: str) -> bool:
    """Return whether a folder is that of one step, which `AsyncCheckpointer` has saved."""
    name = os.path.basename(os.path.abspath(folder))
    return name.startswith("step-") and os.path.isfile(os.path.join(folder, "manifest.json"))


def step_in_words(folder: str) -> str:
    """Return the message for the folder of one step that was given in another one's place."""
    above, name = os.path.split(os.path.abspath(folder))
    call = f"AsyncCheckpointer({above!r}).restore(state, step={name.removeprefix('step-')})"
    return f"'{folder}' is the folder of one step. Load it by {call}"


def empty_file(path: str) -> CorruptData:
    """Return the error for a file of 0 bytes."""
    message = f"'{path}' is empty (0 bytes), as a save that was killed or found no space leaves it. {_FETCH}"
    return CorruptData(message, path)


def foreign_file(place: str, head: bytes) -> CorruptData | None:
    """Return the error for a file that is neither torch's nor a safetensors file.

    None if it may be one.

    Args:
        place: words for the file, with its path.
        head: its first bytes.
    """
    if _is_npz(head):
        return CorruptData(f"{place} is no checkpoint: it is an npz file of numpy's. Read it with numpy.load")
    if head.startswith(b"\x80") and _OLDER_MAGIC not in head:
        return CorruptData(
            f"{place} is no checkpoint: it is a pickle that torch.save did not write. If you trust it, read it by "
            "pickle.load"
        )
    if head and not any(head):
        return CorruptData(
            f"{place} begins with zeros, as a crash of the machine leaves a file that was not on storage yet. {_FETCH}"
        )
    start = head.lstrip().lower()
    for magic, what in _FOREIGN:
        if head.startswith(magic) or start.startswith(magic):
            return CorruptData(f"{place} is no checkpoint: it is {what}")
    with contextlib.suppress(UnicodeDecodeError):
        text = head.decode().strip()
        if text and all(one.isprintable() or one.isspace() for one in text):
            return CorruptData(f"{place} is no checkpoint: it is text, and begins with {text[:20]!r}. Check the path")
    return None


def _is_npz(head: bytes) -> bool:
    """Return whether a file begins as a zip whose first file is an array of numpy's."""
    name_bytes = int.from_bytes(head[26:28], "little")
    return head.startswith(ZIP_MAGIC) and head[30:][:name_bytes].endswith(b".npy")


@contextlib.contextmanager
def torch_errors_explained(
    path: str, place: str, length: int, *, offset: int = 0, head: bytes = ZIP_MAGIC, weights_only: bool | None
) -> Iterator[None]:
    """Add the place to errors of torch and pickle.

    For ``with``, around their reading of a file.

    Args:
        path: of the file.
        place: words for what is read, with the path.
        length: how many bytes are read.
        offset: where they begin in the file.
        head: the file's first few dozen bytes.
        weights_only: as `torch.load` was called with. If False, errors may come from the user's own
            classes.

    Raises:
        CorruptData: the file is cut short, damaged, or of another kind.
        pickle.UnpicklingError, RuntimeError, ...: torch refuses the file, with torch's own type,
            and its words unless `forbidden` knows better ones.
    """
    try:
        yield
    except Exception as error:
        explained = _explained(error, place, head, weights_only)
        if explained is error:
            raise
        if isinstance(explained, CorruptData):
            explained.path, explained.offset, explained.length = path, offset, length
        raise explained from error


# Types that can be constructed from a message, and that somebody may catch by name.
_KEPT_TYPES = (
    pickle.UnpicklingError, RuntimeError, NotImplementedError, ImportError, ModuleNotFoundError, AttributeError,
    TypeError, ValueError, KeyError, IndexError, AssertionError,
)  # fmt: skip
# Words of torch and pickle about files that are cut short or damaged.
_DAMAGE = (
    "PytorchStreamReader", "unexpected EOF", "wrong byte size", "nvalid magic number", "orrupt",
    "pickle data was truncated", "pickle exhausted",
)  # fmt: skip
# torch's words if its probe for an older file ends at the header of a zip's record.
_A_ZIP_BEHIND = "did you mean to use torch.jit.load"
# torch's words about archives that torch.save did not write.
_ANOTHER_ZIP = ("failed locating file data.pkl", 'hasRecord("version")', "archive is not in a subdirectory")
_TORCHSCRIPT = "TorchScript archives passed to"
# Compiled when first used: they are for errors.
# torch's words about what weights_only forbids: its name, with its module.
_FORBIDDEN = r"GLOBAL ([\w.<>]+) (?:was not an allowed global|whose module \S+ is blocked)"
_COLORS = r"\x1b\[[0-9;]*m"  # of a terminal, in torch's words


def forbidden(place: str, error: BaseException | None, call: str) -> pickle.UnpicklingError | None:
    """Return the error for what weights_only forbids. None: ``error`` is about something else.

    Args:
        place: words for the file, with its path.
        error: of torch.
        call: what the user called, with the argument that allows it.
    """
    found = re.search(_FORBIDDEN, str(error))
    if found is None:
        return None
    name, module = found[1], found[1].rpartition(".")[0]
    words = f"{place} has {name}, which weights_only=True does not allow. "
    if module not in sys.modules:
        allows = "some packages allow torch to load their classes when they are imported, as torchao does"
        words += f"{module} is not imported here: {allows}. Import it first. "
    others = "allow it by torch.serialization.add_safe_globals, or save plain values in its place"
    return pickle.UnpicklingError(f"{words}If you trust the file, call {call}; or {others}")


@contextlib.contextmanager
def call_named(place: str, call: str) -> Iterator[None]:
    """Have the error for what weights_only forbids name the call that the user made.

    For ``with``, around a `gdsdata.load` that the user did not call.

    Args:
        place, call: as of `forbidden`.

    Raises:
        pickle.UnpicklingError: with these words, or the error as it was.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        refused = forbidden(place, error.__cause__, call)
        if refused is None:
            raise
        raise refused from error.__cause__


def _explained(error: Exception, place: str, head: bytes, weights_only: bool | None) -> Exception:
    if isinstance(error, (GdsdataError, OSError, MemoryError, torch.OutOfMemoryError)):
        return error
    if len(head) < len(ZIP_MAGIC) and ZIP_MAGIC.startswith(head):
        return CorruptData(f"{place} is cut short: it has no more than the first bytes of a zip. {_FETCH}")
    may_be_torchs = head.startswith(ZIP_MAGIC) and not _is_npz(head)
    if not may_be_torchs and (foreign := foreign_file(place, head)) is not None:
        return foreign
    if weights_only and (refused := forbidden(place, error, "gdsdata.load(..., weights_only=False)")) is not None:
        return refused
    takes_it_for_another = isinstance(error, pickle.UnpicklingError) or _A_ZIP_BEHIND in str(error)
    if takes_it_for_another and not head.startswith(_TORCH_MAGICS):
        # torch takes it for a pickle or a TorchScript archive, and may advise weights_only=False.
        return CorruptData(f"{place} is damaged: it begins with {head[:4]!r}, as no file of torch's does. {_FETCH}")
    said = re.sub(_COLORS, "", str(error)) or type(error).__name__
    if any(words in said for words in _ANOTHER_ZIP):
        remedy = "torch.export.load reads a .pt2 archive. Unpack another zip, and load the files in it"
        return CorruptData(f"{place} is a zip that torch.save did not write in this form: {remedy}")
    if _TORCHSCRIPT in said:
        remedy = "load it by torch.jit.load, or, if you trust it, by gdsdata.load(..., weights_only=False)"
        return RuntimeError(f"{place} is a program of TorchScript, and no checkpoint: {remedy}")
    has_words = isinstance(error, (RuntimeError, pickle.UnpicklingError)) and any(m in said for m in _DAMAGE)
    is_damage = isinstance(error, EOFError) or has_words
    only_torchs_code_ran = weights_only is not False and not isinstance(error, (RuntimeError, pickle.UnpicklingError))
    if is_damage or only_torchs_code_ran:
        return CorruptData(f"{place} is cut short or damaged: {type(error).__name__}: {said.splitlines()[0]}. {_FETCH}")
    if type(error) not in _KEPT_TYPES:
        return error
    remedy = ""
    if isinstance(error, (ImportError, AttributeError)):
        remedy = ". The file names what cannot be imported here: install it, or import what defines it first"
    return type(error)(f"{place}: {said}{remedy}")


def unpicklable(value: Any, error: Exception, pickled: Callable[[Any], object]) -> Exception:
    """Return the error of pickling a tree, with the name of the value that caused it.

    Args:
        value: the tree.
        error: the error.
        pickled: pickles one value alone, and raises the same error for it.
    """
    if type(error) not in (pickle.PicklingError, TypeError, AttributeError):
        return error
    with contextlib.suppress(RecursionError):  # a container that contains itself
        for one in leaves(value):
            try:
                pickled(one.value)
            except Exception as its:
                if not one.path or type(its) is not type(error):
                    break
                kind = type(one.value).__name__
                return type(error)(
                    f"{name_of(one.path)}, of type {kind}, cannot be saved: {its}. Leave it out, or save plain values "
                    "in its place"
                )
    return error
