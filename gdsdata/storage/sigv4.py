"""Signature version 4 of S3, and the same of GCS with an HMAC key.

Source: AWS, "Authenticating Requests (AWS Signature Version 4)" in the Amazon S3 API reference.
Google, "Signatures" of Cloud Storage, which renames its parts.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote, urlsplit

from gdsdata.storage.secret import Keys

UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Dialect:
    """The names that a service has for the parts of a signature."""

    key_prefix: str
    algorithm: str
    ending: str
    header_prefix: str
    service: str


AWS = Dialect("AWS4", "AWS4-HMAC-SHA256", "aws4_request", "x-amz-", "s3")
GOOGLE = Dialect("GOOG4", "GOOG4-HMAC-SHA256", "goog4_request", "x-goog-", "storage")


def encode(text: str, safe: str = "") -> str:
    """Percent-encode all but letters, digits, ``-._~`` and ``safe``, as UTF-8."""
    return quote(text, safe=safe)


def encode_key(key: str) -> str:
    """Percent-encode an object's key as a URL's path."""
    return quote(key, safe="/")


def query_of(values: Mapping[str, str]) -> str:
    """Return a URL's query, in the order that is signed."""
    return "&".join(sorted(f"{encode(name)}={encode(value)}" for name, value in values.items()))


def with_headers(
    dialect: Dialect, method: str, url: str, headers: Mapping[str, str], keys: Keys, region: str, now: datetime
) -> dict[str, str]:
    """Return the headers to send in place of ``headers``: signed, with Host and the date.

    Args:
        headers: all of them are signed. They contain the prefix's ``content-sha256``: a hex digest
            of the body, or `UNSIGNED`.
    """
    prefix = dialect.header_prefix
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    signed["host"] = _host_of(url)
    signed[f"{prefix}date"] = _stamp(now)
    if keys.session_token:
        signed[f"{prefix}security-token"] = keys.session_token
    payload = signed[f"{prefix}content-sha256"]
    scope, signature = _signature(dialect, method, url, signed, payload, keys, region, now)
    signed["authorization"] = (
        f"{dialect.algorithm} Credential={keys.access_key_id}/{scope},"
        f"SignedHeaders={';'.join(sorted(signed))},Signature={signature}"
    )
    return signed


def with_query(dialect: Dialect, method: str, url: str, keys: Keys, region: str, now: datetime, lifetime_s: int) -> str:
    """Return ``url`` signed in its query, for requests with any headers but another Host."""
    name = "-".join(part.capitalize() for part in dialect.header_prefix.split("-"))
    values = {
        f"{name}Algorithm": dialect.algorithm,
        f"{name}Credential": f"{keys.access_key_id}/{_scope(dialect, region, now)}",
        f"{name}Date": _stamp(now),
        f"{name}Expires": str(lifetime_s),
        f"{name}SignedHeaders": "host",
    }
    if keys.session_token:
        values[f"{name}Security-Token"] = keys.session_token
    query = "&".join(filter(None, [urlsplit(url).query, query_of(values)]))
    unsigned = f"{url.partition('?')[0]}?{query}"
    host = {"host": _host_of(url)}
    _, signature = _signature(dialect, method, unsigned, host, UNSIGNED, keys, region, now)
    return f"{unsigned}&{name}Signature={signature}"


def _host_of(url: str) -> str:
    """Return the Host header that clients send: without a port that is the scheme's own."""
    parts = urlsplit(url)
    return parts.netloc.removesuffix({"http": ":80", "https": ":443"}.get(parts.scheme, ""))


def _stamp(now: datetime) -> str:
    return now.strftime("%Y%m%dT%H%M%SZ")


def _scope(dialect: Dialect, region: str, now: datetime) -> str:
    return f"{now:%Y%m%d}/{region}/{dialect.service}/{dialect.ending}"


def _signature(
    dialect: Dialect,
    method: str,
    url: str,
    headers: Mapping[str, str],
    payload: str,
    keys: Keys,
    region: str,
    now: datetime,
) -> tuple[str, str]:
    """Return the scope and the signature, in hex, of a request. ``headers`` are in lower case."""
    parts = urlsplit(url)
    names = sorted(headers)
    pairs = [pair if "=" in pair else f"{pair}=" for pair in parts.query.split("&") if pair]
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            "&".join(sorted(pairs, key=lambda pair: tuple(pair.split("=", 1)))),
            *(f"{name}:{headers[name]}" for name in names),
            "",
            ";".join(names),
            payload,
        ]
    )
    scope = _scope(dialect, region, now)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = (dialect.key_prefix + keys.secret_access_key).encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    to_sign = "\n".join([dialect.algorithm, _stamp(now), scope, digest])
    return scope, hmac.digest(key, to_sign.encode(), "sha256").hex()
