"""`torch_hooks`, `install_torch_hooks`: torch's checkpoint functions on gdsdata's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gdsdata.checkpoint import hooks_files
from gdsdata.checkpoint.hooks_report import COUNTS, HooksReport, Snapshot
from gdsdata.fork_safe import fork_safe_lock

_changing = fork_safe_lock()  # guards what follows, and the functions of torch that are replaced
_users: set[Hooks] = set()
_replaced: list[tuple[Any, str, Any]] = []  # the module or class, the name in it, and torch's own function


class Hooks:
    """The hooks of one ``with``, or of `install_torch_hooks`. Any thread may call it."""

    def __init__(self) -> None:
        self._begin = COUNTS.snapshot()
        self._end: Snapshot | None = None  # not yet

    def report(self) -> HooksReport:
        """Return what went through gdsdata since these hooks came, and what torch did itself.

        It has the calls of all threads of this process. After the ``with``, it stays as it was at
        its end.
        """
        return (self._end or COUNTS.snapshot()).since(self._begin)

    def _close(self) -> None:
        self._end = self._end or COUNTS.snapshot()


@contextlib.contextmanager
def torch_hooks(*, safetensors: bool = False) -> Iterator[Hooks]:
    """Have torch's own checkpoint functions work through gdsdata; for ``with``.

    They are `torch.save`, `torch.load` and torch.distributed.checkpoint, by whatever names a
    program has imported them, and whenever.

        with gdsdata.torch_hooks() as hooks:
            torch.save(model.state_dict(), "model.pt")
            model.load_state_dict(torch.load("model.pt"))
        print(hooks.report())  # what went through gdsdata, and what torch did itself, and why

    This holds for all threads of the process. It may be nested.

    Files are the same, and so are the results. A file that was saved under its name is on storage
    when the call returns, and replaces the old one as a whole. If no new file can replace it (a
    bind-mounted file, a folder that is not writable), torch overwrites it in place, with one
    warning. The file of an open file object is written in place, and not synced, as by torch.

    A function as ``map_location`` gets each storage once, with its values, in torch's order. Up to
    1 GiB of storages, or one larger one, are read ahead of it into the CPU's memory.

    With torch.distributed.checkpoint, a `FileSystemWriter` or `FileSystemReader` that anybody makes
    is gdsdata's, a subclass. So is that of a ``checkpoint_id`` alone, which may also be a URL, and
    that of `async_save`, in a thread or in a process.

    torch does the work if gdsdata would behave differently:

    - file objects other than those of local files (`open`, tempfile, fsspec), such as io.BytesIO,
      and those that are not at the beginning; saves to files that are not empty, or appended to
    - saves to symbolic links, old files and damaged files
    - a ``pickle_module``, or ``mmap=True``
    - devices other than CPU and CUDA, unless ``map_location`` is a function
    - a switch of `torch.utils.serialization.config` that gdsdata does not follow
    - subclasses of `FileSystemWriter` and `FileSystemReader`, and ``single_file_per_rank=False``,
      ``_extensions`` or another ``serialization_format``

    Args:
        safetensors: the functions of the package `safetensors` work through gdsdata too, for all
            libraries that use them: see `gdsdata.safetensors.install`. `Hooks.report` has them too.

    Raises:
        NotInstalled: ``safetensors=True``, and there is no such package.

    Stream semantics: as `gdsdata.save` and `gdsdata.load`.
    """
    with _safetensors().installed() if safetensors else contextlib.nullcontext():
        hooks = Hooks()
        try:
            _begin(hooks)
            yield hooks
        finally:
            try:
                _end(hooks)
            except BaseException:  # Ctrl-C may come as the call begins, or at any call in it
                _end(hooks)
                raise


def install_torch_hooks(*, safetensors: bool = False) -> Hooks:
    """Install `torch_hooks` for the rest of the program, and return what reports of them."""
    hooks = Hooks()
    try:
        _begin(hooks)
    except BaseException:
        _end(hooks)
        raise
    if safetensors:
        _safetensors().install()
    return hooks


def _safetensors() -> Any:
    from gdsdata.checkpoint.safetensors import installed  # late: most programs do without

    return installed


def are_installed() -> bool:
    """Return whether torch's functions are replaced in this process now."""
    return bool(_users)


def _begin(hooks: Hooks) -> None:
    """Replace torch's functions, if nobody has. If this raises, `_end` restores them."""
    with _changing:
        _users.add(hooks)
        for owner, name, instead in () if _replaced else _replacements():  # it may raise
            _replaced.append((owner, name, vars(owner)[name]))
            setattr(owner, name, instead)


def _end(hooks: Hooks) -> None:
    """Restore torch's functions, if nobody else uses the hooks. May be called again."""
    with _changing:
        hooks._close()
        _users.discard(hooks)
        while not _users and _replaced:
            setattr(*_replaced[-1])
            _replaced.pop()


def _replacements() -> list[tuple[Any, str, Any]]:
    found = hooks_files.replacements()
    if torch.distributed.is_available():
        from gdsdata.checkpoint import hooks_dcp  # late: torch.distributed.checkpoint takes 0.3 s to import

        found += hooks_dcp.replacements()
    return found
