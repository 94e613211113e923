"""Checks of a URL: the way to its server, and what the server serves."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.place import Place, place_of
from gdsdata.io.file_systems import NETWORK_KINDS
from gdsdata.io.remote_access import BLOCK_BYTES, CACHE_VARIABLE
from gdsdata.storage.location import local_folder

# AWS refuses signatures that are 15 minutes off, and others less.
_MOST_SKEW_S = 300.0
_SOON_S = 14 * 86400.0  # a certificate that ends within this time is worth a word
_LEAST_LIFE_S = 15.0  # as storage/credentials.py: what ends sooner signs nothing
_FAR_S = 0.02  # a round trip within a region takes a few ms
_LEAST_FREE_BYTES = 10 * 2**30
_STILL_GROWS = 1.5


@check("libcurl, which reads URLs")
def libcurl(host: Host, place: Place) -> Answer:
    """Look for the library: the engine loads it when the first URL is read."""
    found = host.probe("libcurl", place.path) or {}
    if refusal := found.get("refusal"):
        reason, _, remedy = refusal.partition("; ")
        return no(reason, remedy or "install libcurl: apt-get install libcurl4, or dnf install libcurl")
    if "version" not in found:
        return unknown(found.get("error", "it was not looked for"))
    return yes(found["version"])


@check("no proxy on the way")
def proxy(host: Host, place: Place) -> Answer:
    """Look for a proxy in the environment, as libcurl does."""
    if _lack_of_address(host, place):
        return unknown("the server's name is not known")
    found = host.probe("proxy", place.path) or {}
    if "proxy" not in found:
        return unknown(found.get("error", "it was not looked for"))
    if found["proxy"]:
        remedy = "if the server can be reached directly, name its host in NO_PROXY: all bytes go through the proxy"
        return no(f"{found['name']} is {found['proxy']}", remedy)
    return yes("the environment names none for this host")


@check("cache on a local disk")
def cache_folder(host: Host, place: Place) -> Answer:
    """Look at the cache that the environment names: file system, space, and what it holds."""
    named = host.environment(CACHE_VARIABLE)
    if not named:
        return unknown(
            f"{CACHE_VARIABLE} is not set", "without a cache, each epoch fetches all bytes: set it, or cache="
        )
    try:
        folder = os.path.abspath(local_folder(CACHE_VARIABLE, named))
    except ValueError as error:
        return no(str(error).partition(": give")[0], "name a folder on a local disk")
    found = host.probe("cache", folder) or {}
    if "free_bytes" not in found:
        return no(f"{folder}: {found.get('error', 'it was not looked at')}", "name a folder on a local disk")
    mount = place_of(host, folder).mount
    kind = mount.kind if mount else "an unknown file system"
    said = f"{folder} on {kind}, {found['free_bytes'] / 1e9:.1f} GB free"
    if held := found.get("held"):
        of_most = f" of at most {held['most_bytes'] / 1e9:.1f}" if held["most_bytes"] < 2**60 else ""
        said += f", holds {held['used_bytes'] / 1e9:.2f}{of_most} GB in blocks of {held['block_bytes'] / 2**20:g} MiB"
    else:
        said += f", empty, blocks will have {BLOCK_BYTES / 2**20:g} MiB"
    if kind.removeprefix("fuse.") in NETWORK_KINDS:
        return no(said, "name a folder on a local NVMe disk: this one is behind a network, too")
    if not found["may_write"]:
        return no(f"{said}; this user may not write there", f"chown or chmod {folder}, or name another folder")
    if found["free_bytes"] < _LEAST_FREE_BYTES and not held:
        return yes(said, "little space is free: what does not fit is fetched again in each epoch")
    return yes(said)


@check("name of the server known")
def dns(host: Host, place: Place) -> Answer:
    found = host.probe("dns", place.path) or {}
    if "addresses" not in found:
        if "host" not in found:
            reason, _, remedy = _lack_of_address(host, place).partition(". ")
            return no(reason, remedy or "set the region: AWS_REGION")
        remedy = "check the URL, endpoint_url and region; then /etc/resolv.conf and the VPN"
        return no(f"{found['host']}: {found['error']}", remedy)
    addresses = found["addresses"]
    more = f" and {len(addresses) - 4} more" if len(addresses) > 4 else ""
    return yes(f"{found['host']} is {', '.join(addresses[:4])}{more}, in {1000 * found['took_s']:.0f} ms")


@check("TLS, certificate accepted")
def tls(host: Host, place: Place) -> Answer:
    """Check the certificate with the authorities that the engine's client trusts."""
    if _lack_of_address(host, place):
        return unknown("the server's name is not known")
    found = host.probe("tls", place.path) or {}
    if found.get("plain"):
        return unknown(
            "plain http: bytes and tokens can be read on their way", "use https outside a network of your own"
        )
    if found.get("proxied"):
        return unknown("a proxy is on the way, and the certificate is looked at behind it alone")
    if "error" in (host.probe("dns", place.path) or {}):
        return unknown("the server's address is not known")
    file = found.get("authorities")
    trusted = f"the authorities in {file}" if file else "the system's authorities"
    if refused := found.get("authorities_error"):
        return no(refused, f"name a file of authorities that can be read in {found['variable']}, or unset it")
    if wrong := found.get("certificate_error"):
        remedy = "name the authority's file in SSL_CERT_FILE, or check the host's name in endpoint_url"
        if "expired" in wrong:
            remedy = "the server's operator has to renew it; or set this machine's clock"
        return no(f"{wrong}, by {trusted}", remedy)
    if "version" not in found:
        return no(found.get("error", "it was not tried"), "check the port, and that the server speaks TLS there")
    left_s = found["ends"] - time.time()
    said = f"{found['version']}, by {found['issuer'] or 'an authority without a name'}, ends {_day(found['ends'])}"
    if left_s < _SOON_S:
        return yes(said, f"it ends in {left_s / 86400:.1f} days: see that it is renewed")
    return yes(said)


@check("clocks agree")
def clock(host: Host, place: Place) -> Answer:
    """Compare this machine's clock with the server's Date header: signatures have the time."""
    found = _range(host, place)
    try:
        theirs = parsedate_to_datetime(found["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return unknown("the server sent no Date" if found.get("status") else "the server did not answer")
    apart_s = found["at_s"] - theirs
    if abs(apart_s) < 2:  # Date has whole seconds
        return yes("within 2 s of the server's")
    said = f"this machine is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the server"
    if abs(apart_s) < _MOST_SKEW_S:
        return yes(said)
    return no(said, "set the clock: timedatectl set-ntp true, or chronyc makestep; servers refuse such signatures")


@check("credentials")
def credentials(host: Host, place: Place) -> Answer:
    """Say where credentials come from, and when they end."""
    found = host.probe("credentials", place.path) or {}
    if "kind" not in found:
        reason, _, remedy = found.get("error", "they were not looked for").partition(". ")
        return no(reason, remedy or "set the environment's variables, or a profile: docs/guide/remote.md")
    said = f"{found['kind']}, from {found['source'] or 'an option'}"
    if found["kind"] == "Anonymous":
        said = f"{found['source'] or 'none'}; requests are not signed"
    if found["ends"] is None:
        return yes(said)
    left_s = found["ends"] - time.time()
    when = datetime.fromtimestamp(found["ends"], timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    if left_s < _LEAST_LIFE_S:
        return no(f"{said}; ended {when}", "renew them: aws sso login, or what else made them")
    return yes(f"{said}; looked for again before {when}")


@check("region")
def region(host: Host, place: Place) -> Answer:
    """Compare the bucket's region with the one that the environment names."""
    if place.path.partition(":")[0] != "s3":
        return unknown("only S3 says in which region a bucket is")
    if _lack_of_address(host, place):
        return unknown("the server's name is not known")
    answered = _range(host, place).get("region")
    found = host.probe("region", place.path) or {}
    used, named = found.get("region"), found.get("named")
    if answered and named and answered != named:
        remedy = f"set AWS_REGION={answered}, and run in that region: others are slower, and their bytes cost more"
        return no(f"the bucket is in {answered}, and the environment names {named}", remedy)
    if not used:
        return unknown(found.get("error", "it was not asked for"))
    return yes(f"{answered or used}{', as the server says' if answered else ''}; requests go to {found['host']}")


@check("one range")
def one_range(host: Host, place: Place) -> Answer:
    """Read the first bytes, and verify status, range and length."""
    if place.silence:
        return no(place.silence, "name an object that is there: python -m gdsdata.doctor s3://bucket/key")
    found = _range(host, place)
    status, said = found.get("status", 0), found.get("said", "")
    if not status:
        reason, _, remedy = found.get("error", "").partition(". ")
        return no(said or reason or "no answer", found.get("remedy") or remedy or "check the lines above")
    by = f"by {found['server']}" if found["server"] else "by a server without a name"
    who = f"{by}, request id {found['request_id']}" if found["request_id"] else by
    if status == 416:
        return no(f"416, {who}", "the object is empty: name another one")
    if status not in (200, 206):
        return no(f"{status}{f' {said}' if said else ''}, {who}", found["remedy"])
    count, total = found["bytes"], found["total_bytes"]
    if status == 200 and found["length"] > count:
        return no(f"200 with the whole object, {who}", "use a server that serves ranges")
    expected = f"bytes 0-{count - 1}/{total}"
    if found["content_range"] not in ("", expected) or found["length"] != count or not count:
        wrong = f"{status} with {count} bytes, and Content-Range {found['content_range'] or 'is missing'}"
        return no(f"{wrong}, {who}", "look for a cache or a proxy that answers wrongly")
    said = f"{status}, {expected}, ETag {found['tag'] or 'missing'}, {1000 * found['took_s']:.0f} ms, {who}"
    if not found["content_range"]:
        return yes(said, "without Content-Range, only the number of bytes is checked")
    if not found["tag"]:
        return yes(said, "without an ETag, an object that is replaced may not be noticed")
    return yes(said)


@check("round trip")
def round_trip(host: Host, place: Place) -> Answer:
    if one_range(host, place).answer != "yes":
        return unknown("no range was read")
    found = host.probe("round_trip", place.path) or {}
    if "median_s" not in found:
        return unknown(found.get("error", "it was not measured"))
    median, least, most = (f"{1000 * found[name]:.1f}" for name in ("median_s", "least_s", "most_s"))
    said = f"{median} ms, the median of some HEAD requests ({least} to {most} ms)"
    if found["median_s"] > _FAR_S:
        return yes(said, "this is far: a machine in the region of the data is nearer; long pieces matter more")
    return yes(said)


@check("throughput")
def throughput(host: Host, place: Place) -> Answer:
    """Measure what a growing number of connections give."""
    if one_range(host, place).answer != "yes":
        return unknown("no range was read")
    found = host.probe("throughput", place.path) or {}
    if "rows" not in found:
        few = f"the object has {found['bytes']} bytes, too few to measure" if "bytes" in found else "not measured"
        return unknown(found.get("error", few))
    rows: list[dict[str, Any]] = found["rows"]
    best = max(rows, key=lambda row: row["gb_per_s"])
    steps = ", ".join(f"{row['connections']}: {row['gb_per_s']:.3g}" for row in rows)
    said = f"{best['gb_per_s']:.3g} GB/s with {best['connections']} connections ({steps} GB/s)"
    requests, throttled, failed = (sum(row[name] for row in rows) for name in ("requests", "throttled", "failed"))
    if throttled:
        remedy = "read with fewer processes, spread the objects over more prefixes, or ask for a higher limit"
        return no(f"{said}; the server throttled {throttled} of {requests} requests (429 or 503)", remedy)
    if failed:
        remedy = "look at the network: cables, a firewall that drops connections, MTU"
        return no(f"{said}; {failed} of {requests} requests failed", remedy)
    if len(rows) > 1 and rows[-1]["gb_per_s"] > _STILL_GROWS * rows[-2]["gb_per_s"]:
        return yes(said, "it still grows: several processes together read faster")
    return yes(said)


def _range(host: Host, place: Place) -> dict[str, Any]:
    if lack := _lack_of_address(host, place):
        return {"error": lack}
    return host.probe("one_range", place.path) or {}


def _lack_of_address(host: Host, place: Place) -> str:
    """Return why the server is not known, or "".

    Without a region, S3 has to be asked for it. That takes its time, and is done once.
    """
    found = host.probe("dns", place.path) or {}
    return "" if "host" in found else found.get("error", "the server was not looked for")


def _day(when_s: float) -> str:
    return datetime.fromtimestamp(when_s, timezone.utc).strftime("%Y-%m-%d")


def shown(url: str) -> str:
    """Return a URL without its query: that may be a signature."""
    return url.partition("?")[0] if urlsplit(url).scheme in ("http", "https") else url
