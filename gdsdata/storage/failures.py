"""The errors of requests: what was asked, what the server said, and what to do."""

from __future__ import annotations

import errno
import re
import socket
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from gdsdata.errors import IoError
from gdsdata.storage import xml_document

_MOST_TEXT = 300  # characters of a server's message that an error shows
_MOST_URL = 2048
MOST_ERROR_BYTES = 64 * 2**10
_REQUEST_IDS = ("x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id")
# Signatures in a query. Servers repeat URLs in messages.
_SIGNED = re.compile(r"(?i)\b(sig|signature|(?:x-(?:amz|goog)-|aws|google)[\w-]+)=[^&\s\"'<>]+")

_VIRTUAL = "Set addressing='virtual', or addressing_style of the AWS profile: the bucket belongs into the host's name."
_REMEDIES = {
    "AuthorizationHeaderMalformed": "Set the bucket's region: region= or AWS_REGION.",
    "EntityTooLarge": "Write a smaller object.",
    "ExpiredToken": "The credentials have expired: renew them.",
    "InvalidAccessKeyId": "The server does not know this access key: check the credentials and endpoint_url.",
    "InvalidBlobOrBlock": "Another program has left blocks of this blob: write it by that one, or take another name.",
    "InvalidBlockList": "Another program writes this blob too: let one write it at a time.",
    "InvalidPathAccess": _VIRTUAL,
    "InvalidObjectState": "The object is archived: restore it first.",
    "NoSuchBucket": "Check the name of the bucket, and endpoint_url, which must not name it too.",
    "ContainerNotFound": "Check the name of the container and of the account.",
    "NoSuchKey": "Check the URL (keys are case-sensitive), and endpoint_url, which must not name the bucket too.",
    "NoSuchUpload": "The upload was aborted, or the bucket's rules have deleted it: begin it again.",
    "PathStyleDomainForbidden": _VIRTUAL,
    "PermanentRedirect": "Set the bucket's region (region= or AWS_REGION), and for AWS no endpoint_url.",
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "SecondLevelDomainForbidden": _VIRTUAL,
    "SignatureDoesNotMatch": "Check the secret key, the region and endpoint_url.",
}
_REMEDIES_OF_STATUS = {
    301: "Set the region or endpoint_url that the server names.",
    400: "Check the region, endpoint_url and the name of the bucket.",
    401: "The server wants credentials, or other ones.",
    403: "Check that the credentials allow this, or that a signed URL has not ended. A public bucket needs "
    "credentials='anonymous'.",
    404: "Check the URL: keys are case-sensitive.",
    405: "The server does not offer this method.",
    410: "Check the URL: keys are case-sensitive.",
    411: "The server or a proxy before it wants another kind of request.",
    412: "The object was replaced in the meantime.",
    413: "Write a smaller object, or in smaller parts.",
    429: "The server throttles: have fewer requests in flight.",
    501: "The server does not offer this request.",
    503: "The server is overloaded or throttles: try again later, or have fewer requests in flight.",
}
_ABOUT_AN_OBJECT = {404, 410}
_ABOUT_PERMISSION = {401, 403}


@dataclass(frozen=True)
class Refusal:
    """An answer that is no success.

    Attributes:
        code: the server's word for the reason, or "".
        message: the server's, shortened and without signatures.
        hidden: what signed the request. No text shows it, even if the server repeats it.
    """

    status: int
    code: str
    message: str
    headers: Mapping[str, str] = field(repr=False)
    hidden: Collection[str] = field(default=(), repr=False)

    @property
    def request_id(self) -> str:
        """The id by which the server's operators find the request, or ""."""
        found = next((self.headers[name] for name in _REQUEST_IDS if name in self.headers), "")
        return shown_text(found, 100, self.hidden)


def refusal_of(status: int, headers: Mapping[str, str], body: bytes, hidden: Collection[str] = ()) -> Refusal:
    """Return what a response says of its reasons, from XML, Azure's header, or plain text.

    Args:
        hidden: what signed the request.
    """
    code = headers.get("x-ms-error-code", "")
    message = ""
    try:
        root = xml_document.parse(body[:MOST_ERROR_BYTES])
    except ValueError:
        if "html" not in headers.get("content-type", ""):
            message = body[: 4 * _MOST_TEXT].decode("utf-8", "replace")
    else:
        error = root if root.tag == "Error" else root.find("Error")
        if error is not None:
            code = code or xml_document.text_of(error, "Code")
            message = xml_document.text_of(error, "Message")
    return Refusal(
        status, shown_text(code, 100, hidden), shown_text(message, _MOST_TEXT, hidden), headers, tuple(hidden)
    )


def refused(subject: str, method: str, url: str, refusal: Refusal, history: str = "") -> OSError:
    """Return the error for a refusal.

    Args:
        subject: the URL that the user knows.
        history: attempts and time, such as "after 4 attempts in 2.1 s", or "".
    """
    said = f"{refusal.status} {refusal.code}".rstrip()
    if refusal.message:
        said += f': "{refusal.message}"'
    details = ", ".join(
        filter(None, [f"request id {refusal.request_id}" if refusal.request_id else "", history, _skew(refusal)])
    )
    remedy = remedy_of(refusal)
    place = shown_text(shown_url(url), _MOST_URL, refusal.hidden)  # a redirect may repeat what it was sent
    message = f"{shown_url(subject)}: {method} {place} was answered with {said}"
    return _error(refusal, f"{message} ({details}). {remedy}" if details else f"{message}. {remedy}", subject)


def remedy_of(refusal: Refusal) -> str:
    """Return what to do about a refusal."""
    remedy = _REMEDIES.get(refusal.code) or _REMEDIES_OF_STATUS.get(refusal.status)
    if remedy is None:
        return "The server failed: try again later." if refusal.status >= 500 else "Check the URL and endpoint_url."
    return remedy


def unreachable(subject: str, method: str, url: str, error: OSError, history: str) -> IoError:
    """Return the error for a request that got no answer."""
    reason, remedy = reason_of(url, error)
    message = f"{shown_url(subject)}: {method} {shown_url(url)} failed ({history}): {reason}. {remedy}"
    number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
    is_system_number = number in errno.errorcode and not isinstance(error, (socket.gaierror, ssl.SSLError))
    return IoError(number if is_system_number and number else errno.EIO, message, shown_url(subject))


def reason_of(url: str, error: OSError) -> tuple[str, str]:
    """Return why a request got no answer, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"the certificate is not accepted: {shown_text(str(error), _MOST_TEXT)}"
        remedy = "Check the host's name, or name the authority's file in SSL_CERT_FILE."
    elif isinstance(error, ssl.SSLError):
        reason = f"no TLS connection was made: {shown_text(error.strerror or str(error), _MOST_TEXT)}"
        remedy = "If the server has no TLS, begin endpoint_url or the URL with http://."
    elif isinstance(error, socket.gaierror):
        reason = f"the host {urlsplit(url).hostname} is not found"
        remedy = "Check the URL, endpoint_url, DNS, and HTTPS_PROXY if there is a proxy."
    elif isinstance(error, TimeoutError):
        reason, remedy = "no answer came in time", "Check the network, and HTTPS_PROXY if there is a proxy."
    elif error.errno == errno.EINVAL:
        reason = f"the URL is malformed: {shown_text(error.strerror or '', _MOST_TEXT)}"
        remedy = "Check the URL and endpoint_url: the host, and a port of at most 65535."
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        reason = shown_text(error.strerror or str(error), _MOST_TEXT)
        remedy = "Raise the limit of open files (ulimit -n)."
    else:
        reason = shown_text(f"{type(error).__name__}: {error.strerror or error}", _MOST_TEXT)
        remedy = "Check the network and that the server runs."
    return reason, remedy


def shown_url(url: str) -> str:
    """Return a URL of http without its query, its fragment, and a user's name and password.

    A key of a store has none of these, so a URL with another scheme is returned as it is.
    """
    if not url.startswith(("http://", "https://")):
        return url
    scheme, _, rest = url.partition("?")[0].partition("#")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _error(refusal: Refusal, message: str, subject: str) -> OSError:
    if refusal.status in _ABOUT_AN_OBJECT and refusal.code != "NoSuchUpload":
        return with_number(FileNotFoundError(message), errno.ENOENT)
    if refusal.status in _ABOUT_PERMISSION:
        return with_number(PermissionError(message), errno.EACCES)
    return IoError(errno.EIO, message, shown_url(subject))


def with_number(error: OSError, number: int) -> OSError:
    """Set the number of an error that has a message alone, so that nothing is put around it."""
    error.errno = number
    return error


def shown_text(text: str, most: int, hidden: Collection[str] = ()) -> str:
    """Return a server's words as an error may have them: one line, without signatures.

    Args:
        most: characters.
        hidden: words that are replaced by "...".
    """
    for word in hidden:
        text = text.replace(word, "...")
    clean = " ".join("".join(one if one.isprintable() else " " for one in text[: 8 * most]).split())
    clean = _SIGNED.sub(r"\1=...", clean)
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


def time_of(date: str) -> float | None:
    """Return a header's date in seconds since the epoch, or None if it is none."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _skew(refusal: Refusal) -> str:
    if refusal.status != 403:
        return ""
    theirs = time_of(refusal.headers.get("date", ""))
    if theirs is None:
        return ""
    apart = time.time() - theirs
    if abs(apart) < 300:
        return ""
    return f"this machine's clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} the server's"
