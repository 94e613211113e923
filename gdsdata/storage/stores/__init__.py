"""Find the store of a URL: one module a scheme."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from gdsdata.fork_safe import fork_safe_lock
from gdsdata.storage.location import Location, location_of
from gdsdata.storage.store import Store

# The module of each scheme. It has `make(bucket, scheme, options) -> Store`.
MODULES = {
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "http": "web",
    "https": "web",
}

_making = fork_safe_lock()
_stores: dict[tuple[str, str], Store] = {}
_options: dict[str, dict[str, Any]] = {}


def configure(scheme: str, **options: Any) -> None:
    """Set how stores of a scheme are reached in this process, in place of the environment.

    Args:
        scheme: such as "s3".
        options: as the scheme's module names them: ``endpoint_url``, ``region``, ``credentials``.

    Raises:
        ValueError: there is no such scheme.
    """
    if scheme not in MODULES:
        raise ValueError(f"scheme={scheme!r}: there are {', '.join(MODULES)}")
    with _making:
        _options[scheme] = options
        for key in [key for key in _stores if key[0] == scheme]:
            del _stores[key]


def check(location: Location, options: Mapping[str, Any]) -> None:
    """Check the options of a store, and leave this process as it is.

    Raises:
        ValueError: one is wrong.
    """
    _made(location, options)


def store_of(url: str) -> tuple[Store, Location]:
    """Return the store of an object's URL, and the object's location. A process keeps its stores.

    Raises:
        ValueError: the URL or the options of its store are wrong.
    """
    location = location_of(url)
    place = location.scheme, location.bucket
    with _making:
        if place not in _stores:
            _stores[place] = _made(location, _options.get(location.scheme, {}))
        return _stores[place], location


def _made(location: Location, options: Mapping[str, Any]) -> Store:
    module = importlib.import_module(f".{MODULES[location.scheme]}", __package__)
    store: Store = module.make(location.bucket, location.scheme, options)
    return store
