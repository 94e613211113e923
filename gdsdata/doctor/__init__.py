"""What this machine can do, which path would serve a file, and the remedy for each no: ``python -m
gdsdata.doctor``.

    for finding in gdsdata.doctor.examine("/data/train.bin"):
        print(finding.answer, finding.question, finding.evidence, finding.remedy)

Without ``--test`` nothing is measured and nothing kept. `evidence` is the one way to files, tools
and probes, so that every check is a function of a `Host` and a `Place`, and runs on a folder of
recorded evidence as well.
"""

from __future__ import annotations

import os

from gdsdata.doctor import gpu, network, pcie, serving, storage, system
from gdsdata.doctor.evidence import STATUS_LIMIT_S, Host, RecordedHost, ThisHost, within
from gdsdata.doctor.finding import Check, Finding
from gdsdata.doctor.place import Place, place_of
from gdsdata.doctor.probes import LIMITS_S, PROBES

__all__ = ["CHECKS", "REQUIREMENTS", "Finding", "Host", "RecordedHost", "ThisHost", "diagnose", "examine", "works"]

# In the order of the report, by its headings.
CHECKS: dict[str, tuple[Check, ...]] = {
    "path": (
        *(serving.reading, serving.gds, storage.file_system, storage.direct, storage.alignment),
        *(storage.udev, pcie.disk_link, serving.calibration),
    ),
    "gpu": (serving.gpu, gpu.driver, gpu.cuda, gpu.gpu_supported, gpu.bar1),
    "gpudirect": (gpu.peer_to_peer, gpu.cufile, serving.fallback, pcie.iommu, pcie.acs, pcie.distance, pcie.numa),
    "network": (network.rdma, network.pause_frames),
    "system": (system.io_uring, system.locked_memory, system.security),
}
# What has to be a yes, by what was asked for.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "any": ("reading",),
    "gpu": ("gpu", "reading"),
    "direct": ("direct",),
    "io_uring": ("io_uring", "reading"),
    "gds": ("gds",),
}
# Above what the probes and tools of one check may take together.
_CHECK_LIMIT_S = 90.0


def this_host() -> ThisHost:
    return ThisHost(PROBES, LIMITS_S)


def examine(path: str | os.PathLike[str], host: ThisHost | None = None) -> list[Finding]:
    """What this machine can do for a file, or for those in a folder.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    host = host or this_host()
    return diagnose(host, locate(host, path))


def locate(host: ThisHost, path: str | os.PathLike[str]) -> Place:
    """The path with its links followed, if its file system answers.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    given, silence = os.path.abspath(os.fspath(path)), ""

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
        silence = str(error)
    return place_of(host, given, silence)


def diagnose(host: Host, place: Place) -> list[Finding]:
    """All checks' findings, in order.

    A check that fails, or does not end, is an unknown, and the others go on.
    """
    return [_ask(check, host, place) for group in CHECKS.values() for check in group]


def _ask(check: Check, host: Host, place: Place) -> Finding:
    try:
        return within(_CHECK_LIMIT_S, lambda: check(host, place))
    except TimeoutError as error:
        if isinstance(host, ThisHost):
            host.left_behind.append(check.__name__)
        why = str(error)
    except Exception as error:
        why = f"what was found could not be understood: {type(error).__name__}: {error}"
    return Finding(check.__name__, check.question, "unknown", why)


def works(findings: list[Finding], requirement: str = "any") -> bool:
    """Whether what was asked for (a key of `REQUIREMENTS`) was shown to work.

    An unknown shows nothing.
    """
    answers = {finding.name: finding.answer for finding in findings}
    return all(answers[name] == "yes" for name in REQUIREMENTS[requirement])
