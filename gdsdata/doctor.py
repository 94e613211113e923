"""What serves a file here, and why: ``python -m gdsdata.doctor [PATH]``.

Each line says yes, no or unknown, what was seen, and what to do about a no. Nothing is measured and nothing kept.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass

import torch

from gdsdata import calibration, engine
from gdsdata.errors import BackendUnavailable
from gdsdata.options import EngineOptions

_READ_BYTES = 65536


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        question: what was asked.
        answer: "yes", "no" or "unknown".
        evidence: what was seen.
        remedy: what to do about it; empty where there is nothing to do.
    """

    question: str
    answer: str
    evidence: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.answer:8}{self.question}: {self.evidence}"
        return f"{line}\n        -> {self.remedy}" if self.remedy else line


def examine(path: str | os.PathLike[str]) -> list[Finding]:
    """What this machine can do for a file, or for those in a folder.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    path = os.fspath(path)
    os.stat(path)
    findings = [_uring(), _direct(path), _gpu()]
    if torch.cuda.is_available():
        findings += [_gpudirect(), _calibration(path)]
    return findings


def _uring() -> Finding:
    shared = engine.shared_engine(EngineOptions(), torch.device("cpu"))
    reason = shared.fallback_reason
    if not reason:
        return Finding("io_uring", "yes", f"the engine runs on it, {shared.workers} workers")
    remedy = "permit io_uring's calls (containers: seccomp; kernel.io_uring_disabled), on a kernel of 5.11 or newer"
    return Finding("io_uring", "no", reason, remedy)


def _direct(path: str) -> Finding:
    """By reading with O_DIRECT: what the engine does."""
    question = f"O_DIRECT on '{path}'"
    try:
        if os.path.isdir(path):
            with tempfile.NamedTemporaryFile(dir=path, prefix=".gdsdata-doctor-") as file:
                file.write(bytes(_READ_BYTES))
                file.flush()
                _read_direct(file.name)
        elif os.path.getsize(path) < _READ_BYTES:
            return Finding(question, "unknown", f"it has {os.path.getsize(path)} bytes, too few to tell")
        else:
            _read_direct(path)
    except PermissionError as error:
        return Finding(question, "unknown", str(error), "name a file that may be read, or a folder that may be written")
    except OSError as error:
        remedy = "files are read through the page cache; local ext4 and xfs allow it"
        return Finding(question, "no", str(error), remedy)
    return Finding(question, "yes", f"{_READ_BYTES} bytes were read so")


def _read_direct(path: str) -> None:
    options = EngineOptions(direct="always", workers=1)
    into = torch.empty(_READ_BYTES, dtype=torch.uint8)
    shared = engine.shared_engine(options, into.device)
    shared.read(path, 0, into.nbytes, into.data_ptr(), shared.mark(0), False)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return Finding("GPU", "no", f"torch {torch.__version__} with {built} sees none", "batches are made on the CPU")
    try:
        device = engine.resolved("cuda")
    except BackendUnavailable as error:
        return Finding("GPU", "no", str(error), "see that nvidia-smi works, and that no other program holds the GPU")
    return Finding("GPU", "yes", f"{device} is current: {torch.cuda.get_device_name(device)}")


def _gpudirect() -> Finding:
    if engine.cufile_dma_is_possible():
        return Finding("GPUDirect Storage", "yes", "libcufile is found, and nvidia-fs or P2PDMA configured")
    return Finding(
        "GPUDirect Storage",
        "no",
        "libcufile is not found, or neither nvidia-fs nor P2PDMA is configured",
        "bytes go by way of the host's pinned memory; for the direct way load nvidia-fs, or configure P2PDMA",
    )


def _calibration(path: str) -> Finding:
    """What was kept of an earlier measurement for this GPU and file system."""
    device = engine.resolved("cuda")
    place = calibration.place_of(path, device)
    found = calibration.load().get(place)
    if found is None:
        remedy = "it is measured when a data set of 256 MiB and more is opened for this GPU"
        return Finding("calibration", "unknown", f"nothing is kept for {place}", remedy)
    chosen = {name: getattr(found, name) for name in ("backend", "workers", "queue_depth", "segment_bytes")}
    said = ", ".join(f"{name}={value or 'default'}" for name, value in chosen.items())
    rates = ", ".join(f"{rate} GB/s ({what})" for what, rate in found.gb_per_s.items())
    return Finding("calibration", "yes", f"{place}: {said}; measured in {found.seconds} s: {rates}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gdsdata.doctor", description=__doc__)
    parser.add_argument("path", nargs="?", default=".", help="a file, or a folder of files")
    path = parser.parse_args().path
    try:
        findings = examine(path)
    except FileNotFoundError:
        parser.error(f"there is no '{path}'")
    for finding in findings:
        print(finding)


if __name__ == "__main__":
    main()
