"""Methods of a framework that an adapter overrides, some of them private: are they still there?"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version


def check_overrides(kind: type, mixin: type, names: Sequence[str], package: str, tested: str) -> None:
    """Check that a class of a framework has the methods that a mixin overrides.

    If one were missing, nobody would call the override, and nothing would say so.

    Args:
        kind: the class of the framework, derived from ``mixin`` or not.
        mixin: the class that has the overrides.
        names: of the methods.
        package: the distribution of the framework.
        tested: the version that the tests ran with.

    Raises:
        RuntimeError: a method is missing.
    """
    order = kind.__mro__
    below = order[order.index(mixin) + 1 :] if mixin in order else order
    for name in names:
        if not any(name in vars(one) for one in below):
            raise RuntimeError(
                f"{package} {version(package)} is not served: its {kind.__name__} has no {name}(), which gdsdata "
                f"overrides. The tests ran with {package} {tested}: install that, or update gdsdata"
            )
