"""The options of stores, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


def check_options(scheme: str, options: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise ValueError if an option is unknown or has a wrong type. None stands for unset."""
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{scheme} has no option {name!r}: it has {', '.join(known)}")
        if value is not None and not isinstance(value, known[name]):
            kinds = known[name] if isinstance(known[name], tuple) else (known[name],)
            wanted = " or ".join(kind.__name__ for kind in kinds)  # type: ignore[union-attr]
            raise ValueError(f"{name} of {scheme} is a {type(value).__name__}, but should be a {wanted}")


def checked_endpoint(url: str, source: str) -> str:
    """Return an endpoint's URL without the slash at its end.

    Args:
        source: where it comes from, for the message.

    Raises:
        ValueError: it is no http(s) URL, or has a user, a query or a fragment.
    """
    shown = url.partition("?")[0].rpartition("@")[2]
    wrong = ValueError(f"{source}={shown!r}: an endpoint is written as https://host or https://host:port")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in url:
        raise wrong
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"{source}={url!r}: the port is no number below 65536") from None
    return url.rstrip("/")


def is_true(value: str | None) -> bool:
    """Return whether an environment's variable is set to a word for yes."""
    return (value or "").strip().lower() in ("1", "true", "yes", "on")
