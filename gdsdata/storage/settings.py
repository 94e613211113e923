"""`RemoteSettings`: how a data set reaches its objects, in each of its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from typing import Any

from gdsdata.io import remote_access
from gdsdata.io.remote_access import CACHE_VARIABLE
from gdsdata.storage import stores
from gdsdata.storage.location import is_url, local_folder, location_of
from gdsdata.storage.paths import absolute
from gdsdata.storage.secret import Secret

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGTP]?i?)B?")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_FACTORS |= {"Ki": 2**10, "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
# Options that may have a secret: headers may have an Authorization.
_SECRETS = ("credentials", "headers")

# The settings of this process.
_options_of: dict[str, Mapping[str, Any]] = {}
_folder_of_derived: str | None = None


@dataclass(frozen=True, repr=False)
class RemoteSettings:
    """The arguments of `Reading` that are for objects. They hold for a whole process.

    A pickle has no secret, unless it is for a process that this one spawns, which is to do the
    same.

    Attributes:
        schemes: of the URLs.
        cache: the folder of the cache; None: there is none.
        cache_bytes: of it at most; None: as it has them, or its default.
        options: of the stores of ``schemes``.
    """

    schemes: tuple[str, ...]
    cache: str | None = None
    cache_bytes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        urls: Sequence[str],
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | str | None,
        options: Mapping[str, Any] | None,
    ) -> RemoteSettings:
        """Return the settings for these URLs, with the environment's cache if none is named.

        Raises:
            ValueError: a size that is none, or an option is wrong.
        """
        locations = {location.scheme: location for location in map(location_of, filter(is_url, urls))}
        found = cache_folder(cache)
        size = None if cache_bytes is None else size_bytes_of(cache_bytes)
        if options:
            for location in locations.values():
                stores.check(location, options)
        return cls(tuple(sorted(locations)), found, size, dict(options or {}))

    def take_effect(self) -> None:
        """Have this process reach objects so. It may be called again and again.

        Raises:
            IoError: the cache's folder cannot be used. Nothing has changed then.
        """
        global _folder_of_derived
        if self.cache is not None:
            if self.schemes:
                remote_access.use_cache(self.cache, self.cache_bytes)
            _folder_of_derived = os.path.join(self.cache, "derived")
        if self.options:
            for scheme in self.schemes:
                if _options_of.get(scheme) != self.options:
                    stores.configure(scheme, **self.options)
                    _options_of[scheme] = self.options

    def __repr__(self) -> str:
        shown = {name: "..." if name in _SECRETS else value for name, value in self.options.items()}
        return f"RemoteSettings({self.schemes}, {self.cache!r}, {self.cache_bytes}, {shown})"

    def __getstate__(self) -> dict[str, Any]:
        options = dict(self.options)
        if get_spawning_popen() is None:
            options = {name: value for name, value in options.items() if name not in _SECRETS}
        elif isinstance(secret := options.get("credentials"), Secret):  # refuses to be pickled
            options["credentials"] = _Spelled(type(secret), vars(secret))
        return {**vars(self), "options": options}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        options = dict(state["options"])
        if isinstance(said := options.get("credentials"), _Spelled):
            options["credentials"] = said.kind(**said.values)
        for name, value in {**state, "options": options}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, repr=False)
class _Spelled:
    """A secret on its way to a process that this one spawns."""

    kind: type[Secret]
    values: Mapping[str, Any]


def cache_folder(given: str | os.PathLike[str] | None = None) -> str | None:
    """Return the folder of the cache that was given, or that the environment names; or None.

    Raises:
        ValueError: it is the URL of objects.
    """
    said, name = (os.environ.get(CACHE_VARIABLE), CACHE_VARIABLE) if given is None else (given, "cache")
    return absolute(local_folder(name, said)) if said else None


def folder_of_derived(kind: str) -> str | None:
    """Return the folder in the cache of what is made of objects; None: there is no cache."""
    return None if _folder_of_derived is None else os.path.join(_folder_of_derived, kind)


def size_bytes_of(said: int | str) -> int:
    """Return a number of bytes, such as of "500GiB" or "2 TB".

    Raises:
        ValueError: it is none.
    """
    if isinstance(said, str):
        match = _SIZE.fullmatch(said.strip())
        if match is None or match[2] not in _FACTORS:
            raise ValueError(f'cache_bytes={said!r} is no size: write a number of bytes, or as in "500GiB"')
        said = int(float(match[1]) * _FACTORS[match[2]])
    if said < 0:
        raise ValueError(f"cache_bytes={said}: a cache has no less than 0 bytes")
    return said
