"""The base of every case's settings: a dataclass whose fields have help texts and checks."""

import json
import math
import re
from dataclasses import dataclass, field, fields
from typing import ClassVar

PAGE_BYTES = 4096


def setting(default, help_text, choices=(), within=None, distinct=False, may_be_0=False):
    """A field of a case's settings.

    Args:
        choices: the values that it, or each entry of a list, may have.
        within: the least and the most that the number, or each entry of a list, may be.
        distinct: a list that names at least one value, and none twice.
        may_be_0: a number that need not be more than 0.
    """
    metadata = {"help": help_text, "choices": choices, "within": within, "distinct": distinct, "may_be_0": may_be_0}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def some_of(choices, help_text):
    """A list of some of these choices, none twice: all, unless it is set."""
    return setting(choices, help_text, choices=choices, distinct=True)


def one_of(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: use {' or '.join(choices)}")


def check_field(name, value, metadata):
    """Raises ValueError with the setting's full name, its value and what it may be."""
    values = value if isinstance(value, list | tuple) else [value]
    choices, within, may_be_0 = metadata["choices"], metadata["within"], metadata["may_be_0"]
    if choices and not values:
        raise ValueError(f"{name}=[]: name at least one of {', '.join(choices)}")
    if metadata["distinct"] and (not values or len(set(values)) < len(values)):
        raise ValueError(f"{name}={value}: name at least one, and none twice")
    is_amount = isinstance(value, int | float) and not isinstance(value, bool) and not name.endswith("seed")
    if is_amount and (value < 0 or value == 0 and not may_be_0):
        raise ValueError(f"{name}={value}: must be {'0 or more' if may_be_0 else 'more than 0'}")
    if is_amount and not math.isfinite(value):
        raise ValueError(f"{name}={value}: must be a finite number")
    for one in values:
        if choices:
            one_of(name, one, choices)
        if within and one is not None and not within[0] <= one <= within[1]:
            raise ValueError(f"{name}={one}: must be from {within[0]} to {within[1]}")


def quoted(text):
    """A value for Hydra's command line, which gives some characters a meaning."""
    if re.fullmatch(r"[\w/.-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def written(value):
    """Any setting's value for Hydra's command line."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def overrides(group, settings, without=()):
    """Hydra's command line of the settings that differ from their defaults."""
    default = type(settings)()
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name not in without and value != getattr(default, item.name):
            yield f"{group}.{item.name}={written(value)}"


@dataclass
class CaseSettings:
    """The settings of every case."""

    MAKES = ""  # what a case makes that takes no data.path
    SMALL: ClassVar[dict] = {}  # the most that quick=true leaves of numbers

    name: str = setting("", "what is measured: the class's name, as the group sets it (default: case=loader)")
    rows: list[str] = setting(
        [],
        "only these rows, e.g. [gdsdata,numpy]; empty: all. package.module:Class adds one of your own (see "
        "gdsdata/bench/peers/protocols.py)",
    )
    cache: list[str] = some_of(
        ["warm", "cold"], "page cache states to measure; files in memory (tmpfs) have no cold one"
    )
    seed: int = setting(0, "seed of every shuffle, and of made tensors")
    repeats: int = setting(3, "runs of each row; the rows take turns (A B C A B C), the table shows medians")
    limit_seconds: float = setting(1.5, "time for each limit, over all its turns; not where whole files are moved")

    def __post_init__(self):
        self.name = self.name or type(self).__name__.removesuffix("Settings").lower()

    def check(self, data):
        """Raises ValueError for values that make no sense together.

        Each field was checked by itself before.
        """

    def lack(self, device_name):
        """Return why case=all leaves it out there; "" if it can be measured."""
        return ""

    def check_all(self, data):
        for item in fields(self):
            check_field(f"case.{item.name}", getattr(self, item.name), item.metadata)
        self.check(data)
        if data.path and self.MAKES:
            raise ValueError(f"data.path={data.path}: case={self.name} makes {self.MAKES}; data.folder= says where")

    def make_small(self):
        """Applies quick=true. A value that is smaller already stays."""
        for name, most in {"repeats": 1, "limit_seconds": 0.2, **self.SMALL}.items():
            setattr(self, name, min(getattr(self, name), most))
