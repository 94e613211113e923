"""All checks of a file or a URL: `examine` and its parts."""

from __future__ import annotations

import errno
import os

from gdsdata.doctor import gpu, network, pcie, serving, storage, system, url_checks
from gdsdata.doctor.evidence import STATUS_LIMIT_S, Host, ThisHost, within
from gdsdata.doctor.finding import Check, Finding
from gdsdata.doctor.place import Place, place_of
from gdsdata.doctor.probes import LIMITS_S, PROBES
from gdsdata.doctor.url_probes import URL_LIMITS_S, URL_PROBES
from gdsdata.storage.location import is_url, local_path
from gdsdata.storage.stores import store_of

# By the headings of the report, in its order.
CHECKS: dict[str, tuple[Check, ...]] = {
    "path": (
        *(serving.reading, serving.gds, storage.file_system, storage.direct, storage.alignment),
        *(storage.udev, pcie.disk_link, serving.calibration),
    ),
    "gpu": (serving.gpu, gpu.driver, gpu.cuda, gpu.gpu_supported, gpu.bar1),
    "gpudirect": (gpu.peer_to_peer, gpu.cufile, serving.fallback, pcie.iommu, pcie.acs, pcie.distance, pcie.numa),
    "network": (network.rdma, network.pause_frames),
    "system": (system.io_uring, system.vector_instructions, system.locked_memory, system.security),
}
# Those of a URL.
URL_CHECKS: dict[str, tuple[Check, ...]] = {
    "client": (url_checks.libcurl, url_checks.proxy, url_checks.cache_folder),
    "server": (url_checks.dns, url_checks.tls, url_checks.clock),
    "object": (
        *(url_checks.credentials, url_checks.region, url_checks.one_range),
        *(url_checks.round_trip, url_checks.throughput),
    ),
}
# The checks that must answer yes, by requirement.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "any": ("reading",),
    "gpu": ("gpu", "reading"),
    "direct": ("direct",),
    "io_uring": ("io_uring", "reading"),
    "gds": ("gds",),
}
URL_REQUIREMENTS = {"any": ("one_range",)}
# More than the probes and tools of one check may take together.
_CHECK_LIMIT_S = 90.0


def this_host() -> ThisHost:
    return ThisHost({**PROBES, **URL_PROBES}, {**LIMITS_S, **URL_LIMITS_S})


def examine(path: str | os.PathLike[str], host: ThisHost | None = None) -> list[Finding]:
    """Return what this machine can do for a file, for the files in a folder, or for a URL.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the path is empty, or the URL, or an option of its store in the environment, is
            wrong.
    """
    host = host or this_host()
    return diagnose(host, locate(host, path))


def locate(host: ThisHost, path: str | os.PathLike[str]) -> Place:
    """Return a path's place, with its links followed if its file system answers.

    A URL of a folder or a glob becomes that of one of its objects.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the path is empty, or the URL, or an option of its store in the environment, is
            wrong.
    """
    if is_url(path):
        return _locate_object(host, os.fspath(path))
    if not os.fspath(path):
        raise ValueError("the path is empty: give a file, a folder (the current one is '.'), or a URL")
    given, silence, remedy = os.path.abspath(local_path(path)), "", ""

    def look() -> str:
        os.stat(given)
        return os.path.realpath(given)

    try:
        given = within(STATUS_LIMIT_S, look)
    except FileNotFoundError:
        raise
    except TimeoutError as error:
        host.left_behind.append("path")
        silence = f"'{given}' gives {error}"
    except OSError as error:
        silence, remedy = str(error), _remedy_of(error)
    return place_of(host, given, silence, remedy)


def _remedy_of(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "let this user search the folders above it, which namei -l PATH shows, or name another path"
    if error.errno in (errno.ESTALE, errno.ENOTCONN):
        return "unmount it, and mount it again: the server has dropped what was mounted"
    return "see that its disk or its server works, or name another path"


def _locate_object(host: ThisHost, url: str) -> Place:
    store_of(url)
    found = host.probe("object_to_read", url) or {}
    return Place(found.get("url") or url, found.get("error", ""))


def checks_of(place: Place) -> dict[str, tuple[Check, ...]]:
    """Return the checks for a place, by the headings of the report."""
    return URL_CHECKS if is_url(place.path) else CHECKS


def diagnose(host: Host, place: Place) -> list[Finding]:
    """Return all checks' findings, in order.

    If a check fails or does not end in time, its answer is "unknown", and the others go on.
    """
    return [_ask(check, host, place) for group in checks_of(place).values() for check in group]


def _ask(check: Check, host: Host, place: Place) -> Finding:
    try:
        return within(_CHECK_LIMIT_S, lambda: check(host, place))
    except TimeoutError as error:
        if isinstance(host, ThisHost):
            host.left_behind.append(check.__name__)
        why = str(error)
    except Exception as error:
        why = f"the evidence could not be understood: {type(error).__name__}: {error}"
    return Finding(check.__name__, check.question, "unknown", why)


def works(findings: list[Finding], requirement: str = "any") -> bool:
    """Return whether all checks of a requirement (in `REQUIREMENTS`) answered yes.

    If the findings are of a URL, the only requirement is "any".
    """
    answers = {finding.name: finding.answer for finding in findings}
    of_url = url_checks.one_range.__name__ in answers
    return all(answers[name] == "yes" for name in (URL_REQUIREMENTS if of_url else REQUIREMENTS)[requirement])
