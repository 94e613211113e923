"""Which version of a framework an adapter was tested with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gdsdata.doctor.frameworks import FRAMEWORKS, installed
from gdsdata.warn import warn


@contextlib.contextmanager
def importing(framework: str) -> Iterator[None]:
    """Import an adapter's framework in a ``with``, and say which version was tested.

    Args:
        framework: one of its names in `gdsdata.doctor.frameworks.FRAMEWORKS`.

    Raises:
        ImportError: the framework is not installed, or this version lacks what is imported.

    Warns:
        RuntimeWarning: the tests did not run with this version.
    """
    (names,) = (one.names for one in FRAMEWORKS if framework in one.names)
    (found,) = (one for one in installed() if one.name in names)
    tested = f"gdsdata's adapter of {framework} was tested with version {found.tested}"
    try:
        yield
    except ImportError as error:
        if found.version is None:
            raise ImportError(f"{error}. {tested}: install that one") from error
        raise ImportError(f"{tested}, and {found.version} is installed, which does not fit: {error}") from error
    if found.answer != "tested":
        warn(
            f"{tested}, and {found.version} is installed: it may work. Verify what a program saves by loading it again"
        )
