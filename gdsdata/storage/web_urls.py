"""URLs of http and https: how they are sent, and where a redirect leads."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote, urljoin, urlsplit

from gdsdata.storage.transport import Request, Response


def encoded(url: str) -> str:
    """Return a URL without its fragment, and with what no URL may have percent-encoded."""
    return quote(url.partition("#")[0], safe="%/:?&=+,;@!$'()*[]~")


def redirected(request: Request, response: Response) -> Request | None:
    """Return the request that follows a redirect; None: there is none, or from https to http."""
    if response.status not in (301, 302, 303, 307, 308) or "location" not in response.headers:
        return None
    try:
        target = urljoin(request.url, response.headers["location"])
        is_http = urlsplit(target).scheme in ("http", "https")
    except ValueError:  # such as http://[
        return None
    if not is_http:
        return None
    if request.url.startswith("https://") and not target.startswith("https://"):
        return None
    return replace(request, url=encoded(target))


def have_one_origin(one: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port."""
    return _origin(one) == _origin(other)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    own_port = ":80" if parts.scheme == "http" else ":443"
    return parts.scheme, parts.netloc.lower().removesuffix(own_port)
