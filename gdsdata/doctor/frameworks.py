"""The frameworks that are installed, and how each of them uses gdsdata.

``python -m gdsdata.doctor --frameworks``. No framework is imported.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Version = tuple[int, ...]  # the first numbers of a version

_PACKAGE = __name__.partition(".")[0]
_HOOKS = "torch_hooks"
_ASK = f"{__name__}.as_text({__name__}.installed())"


@dataclass(frozen=True)
class Framework:
    """A framework, and the versions that the tests ran with.

    Attributes:
        names: its distribution, and others that have the same modules.
        oldest, newest: the tested versions; None: none was. Later numbers do not count.
        adapters: what fits it in this package: modules, or a function or class.
        only: the versions that were tested, if not all between `oldest` and `newest` were.
    """

    names: tuple[str, ...]
    oldest: Version | None
    newest: Version | None
    adapters: tuple[str, ...]
    only: tuple[Version, ...] = ()


def _recorded(name: str, adapter: str, *only: Version) -> Framework:
    """Return a framework whose interfaces were recorded in these versions, in rising order."""
    return Framework((name,), only[0], only[-1], (adapter,), only)


# tests/test_doctor_frameworks.py compares the versions that are installed with it.
FRAMEWORKS = (
    Framework(("torch",), (2, 9), (2, 15), (_HOOKS,)),  # `torch_private.CHECKED`
    Framework(("safetensors",), (0, 8), (0, 8), ("safetensors",)),
    Framework(("transformers",), (5, 24), (5, 24), ("integrations.transformers", "integrations.hf_trainer")),
    Framework(("accelerate",), (1, 15), (1, 15), ("integrations.accelerate", _HOOKS)),
    Framework(
        ("lightning", "pytorch-lightning"), (2, 6), (2, 6), ("integrations.lightning", "integrations.lightning_async")
    ),
    Framework(("peft",), (0, 21), (0, 21), (_HOOKS,)),
    Framework(("torchdata",), (0, 11), (0, 11), ("GDSDataset",)),
    Framework(("torchtitan",), (0, 3), (0, 3), ("integrations.torchtitan", "integrations.torchtitan_data")),
    Framework(
        ("megatron-core",),
        (0, 19),
        (0, 19),
        ("integrations.megatron", "integrations.megatron_data", "formats.Megatron"),
    ),
    Framework(("deepspeed",), (0, 19), (0, 19), ("integrations.deepspeed", _HOOKS)),
    _recorded("vllm", "integrations.vllm", (0, 14, 1), (0, 23, 0), (0, 33, 0)),
    _recorded("sglang", "integrations.sglang", (0, 5, 13), (0, 5, 18), (0, 5, 23)),
    Framework(("torchao",), (0, 18), (0, 18), (_HOOKS, "AsyncCheckpointer")),
    Framework(("ray",), (2, 60), (2, 60), ("AsyncCheckpointer", _HOOKS)),
    Framework(("mosaicml",), (0, 32), (0, 32), ("integrations.composer",)),
)


@dataclass(frozen=True)
class Installed:
    """A framework as it is here.

    Attributes:
        name: of the distribution.
        version: None if it is not installed.
        tested: the tested versions, as ``"2.9 to 2.15"`` or ``"0.14.1, 0.23.0"``; "" if none was.
        answer: ``"tested"``, ``"newer"`` or ``"older"`` than the tested versions, ``"not tested"``,
            or ``"absent"``.
        adapters: how it uses gdsdata, as ``"gdsdata.torch_hooks"``. Empty: no way is known.
    """

    name: str
    version: str | None
    tested: str
    answer: str
    adapters: tuple[str, ...]


def installed(version_of: Callable[[str], str] = importlib.metadata.version) -> list[Installed]:
    """Return what is known of each framework in `FRAMEWORKS`.

    Args:
        version_of: returns the version of a distribution, or raises ``PackageNotFoundError``.
    """
    return [_looked_up(one, version_of) for one in FRAMEWORKS]


def hooks_are_installed() -> bool:
    """Return whether `torch_hooks` are in place in this process now."""
    hooks = sys.modules.get(f"{_PACKAGE}.checkpoint.hooks")
    return hooks is not None and hooks.are_installed()


def as_text(found: Sequence[Installed], *, of_this_process: bool = True) -> str:
    """Return a table with a line for each framework, and one on hooks.

    Args:
        found: what `installed` returned.
        of_this_process: False: the reader asks about another program, and this process only prints
            the table.
    """
    rows = [("framework", "version", "tested with", "", "uses gdsdata by")]
    rows += [
        (one.name, one.version or "-", one.tested or "-", one.answer, ", ".join(one.adapters) or "-") for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if any(one.answer in ("newer", "older", "not tested") for one in found):
        lines += ["", "Versions that were not tested may work: verify what a program saves by loading it again."]
    if of_this_process or hooks_are_installed():
        state = "are" if hooks_are_installed() else "are not"
        return "\n".join([*lines, "", f"gdsdata.torch_hooks {state} in place in this process."])
    advice = "A program has torch_hooks of its own. To see whether they are in place, print there:"
    return "\n".join([*lines, "", advice, _ASK])


def _looked_up(framework: Framework, version_of: Callable[[str], str]) -> Installed:
    name, version = framework.names[0], None
    for candidate in framework.names:
        try:
            name, version = candidate, version_of(candidate)
            break
        except importlib.metadata.PackageNotFoundError:
            name = framework.names[0]
    adapters = tuple(f"{_PACKAGE}.{one}" for one in framework.adapters)
    return Installed(name, version, _range_of(framework), _answer(framework, version), adapters)


def _range_of(framework: Framework) -> str:
    if framework.oldest is None or framework.newest is None:
        return ""
    if framework.only:
        return ", ".join(map(_dotted, framework.only))
    return " to ".join(dict.fromkeys(map(_dotted, (framework.oldest, framework.newest))))


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _answer(framework: Framework, version: str | None) -> str:
    if version is None:
        return "absent"
    numbers = re.match(r"\d+(\.\d+)*", version)
    if framework.oldest is None or framework.newest is None or numbers is None:
        return "not tested"
    length = len(framework.newest)
    here = tuple(map(int, numbers[0].split(".")))[:length]
    here += (0,) * (length - len(here))
    if here > framework.newest:
        return "newer"
    if here < framework.oldest:
        return "older"
    return "tested" if not framework.only or here in framework.only else "not tested"
