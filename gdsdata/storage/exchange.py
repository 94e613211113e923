"""One HTTP exchange by the engine's client: its connections, proxies and certificates."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Mapping

from gdsdata.errors import IoError
from gdsdata.io import engine
from gdsdata.io.remote_access import header_lines


def exchange(
    method: str, url: str, headers: Mapping[str, str], body: bytes | memoryview, timeout_s: float, most_bytes: int
) -> tuple[int, dict[str, str], bytes]:
    """Send a request once and return status, headers (names in lower case) and body.

    Redirects are not followed.

    Args:
        body: sent with PUT and POST.
        timeout_s: for the whole exchange.
        most_bytes: a longer body is cut to one byte more than that.

    Raises:
        OSError: the server cannot be reached, the connection broke, or the body is shorter than
            the headers say: ``TimeoutError``, ``ssl.SSLCertVerificationError``, ``ssl.SSLError``,
            ``socket.gaierror`` or ``ConnectionError`` if they apply. Its ``errno`` is EINVAL if the
            URL is malformed.
        BackendUnavailable: there is no libcurl.
        ValueError: a header is none.
    """
    lines = header_lines(headers)
    try:
        status, found, content = engine.http_exchange(method, url, lines, body or None, timeout_s, most_bytes + 1)
    except IoError as error:
        raise _as_system_error(error) from None  # its text has no query, but nothing more of use either
    return status, dict(found), content


def _as_system_error(error: IoError) -> OSError:
    text = str(error).partition(": ")[2]
    if error.errno == errno.EACCES:
        return ssl.SSLCertVerificationError(errno.EACCES, text)
    if error.errno == errno.EPROTONOSUPPORT:
        return ssl.SSLError(errno.EPROTONOSUPPORT, text)
    if error.errno == errno.EHOSTUNREACH:
        return socket.gaierror(socket.EAI_NONAME, text)
    if error.errno == errno.ETIMEDOUT:
        return TimeoutError(errno.ETIMEDOUT, text)
    if error.errno == errno.ECONNREFUSED:
        return ConnectionRefusedError(errno.ECONNREFUSED, text)
    if error.errno == errno.EINVAL:
        return OSError(errno.EINVAL, text)
    return ConnectionError(error.errno, text)
