"""Checks of the route by which the engine really reads the path's bytes."""

from __future__ import annotations

import re

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.place import Place


@check("GPU")
def gpu(host: Host, place: Place) -> Answer:
    """Use the GPU, as a training program does."""
    found = host.probe("gpu")
    if found is None:
        return unknown("it was not tried")
    if "device" in found:
        return yes(f"{found['device']} is current: {found['name']}")
    if found.get("timed_out"):
        return unknown(found["error"], "see that nvidia-smi answers, and look at the kernel's log (dmesg) for Xid")
    remedy = "see that nvidia-smi works, and that no other program holds the GPU"
    return no(found["error"], "batches are made on the CPU" if found.get("none") else remedy)


@check("read by gdsdata")
def reading(host: Host, place: Place) -> Answer:
    """Read with the engine's defaults, into the GPU if there is one."""
    if place.silence:
        return no(place.silence, place.remedy or "see that its server is there, or name another path")
    found = host.probe("reading", place.path)
    if found is None:
        return unknown("it was not tried")
    if "error" in found:
        remedy = "name a file that may be read, or a folder that may be written"
        return unknown(found["error"], remedy) if found.get("empty") else no(found["error"], remedy)
    ways = ", ".join(f"{count} bytes by {way}" for way, count in found["bytes"].items() if count)
    backend = found["backend"] + (f" and {found['device_backend']}" if found["device_backend"] else "")
    return yes(f"{ways}, into {found['device']}; the engine's backend is {backend}")


@check("GPUDirect Storage")
def gds(host: Host, place: Place) -> Answer:
    """Read with cuFile alone, and see in its own statistics what went by DMA.

    libcufile reads through the host without a warning. "supports GDS" of gdscheck is no proof
    either.
    """
    if place.silence:
        return unknown(place.silence)
    found = host.probe("gds", place.path)
    if found is None:
        return unknown("it was not tried")
    if found.get("bytes", {}).get("gds"):
        return yes(f"{found['bytes']['gds']} bytes went by DMA")
    if found.get("empty") or found.get("timed_out"):
        return unknown(found["error"])
    remedy = "bytes go by way of the host's pinned memory; each other no says what the direct way lacks"
    ways = ", ".join(f"{count} bytes by {way}" for way, count in found.get("bytes", {}).items() if count)
    return no(found.get("error") or ways, remedy)


@check("no CPU fallback in cuFile")
def fallback(host: Host, place: Place) -> Answer:
    """Look in the statistics for operations that went through the host.

    With ``--pid`` they are one process's, by ``gds_stats -l 3``: ``posix=`` counts operations
    through the host, if cufile.json has "cufile_stats": 3. Otherwise they are nvidia-fs's, of all
    processes (nvfs-stat.c of NVIDIA/gds-nvidia-fs). ``--test`` compares the CPU's use, too.
    """
    if host.pid is not None:
        printed = host.tool("gds_stats", "-p", str(host.pid), "-l", "3")
        counts = None if printed is None else cufile_operations(printed)
        if counts is None:
            return unknown(
                f"gds_stats says nothing of process {host.pid}", "set profile.cufile_stats to 3 in cufile.json"
            )
        total, through_host = counts
        said = f"of {total} operations of process {host.pid}, {through_host} went through the host"
        if total == 0:
            return unknown(said)
        return no(said, "look at its cufile.log for the reason") if through_host else yes(said)
    text = host.text("/proc/driver/nvidia-fs/stats")
    if text is None:
        return unknown(
            "there is no /proc/driver/nvidia-fs/stats", "pass --pid with the number of a process that uses cuFile"
        )
    if "IO stats: Enabled" not in text:
        remedy = "echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled, as root, or name a process with --pid"
        return unknown("nvidia-fs does not count: IO stats are disabled", remedy)
    done = sum(int(count) for count in re.findall(r"^(?:Reads|Writes|Batches)\s*:.*?\bok=(\d+)", text, re.MULTILINE))
    using = re.search(r"Active Process: (\d+)", text)
    said = f"{done} operations went through nvidia-fs, {using[1] if using else '?'} processes use it"
    if done:
        return yes(said)
    if using and int(using[1]):
        return no(said, "these processes read by way of the host, or not at all: look at their cufile.log")
    return unknown(said)


def cufile_operations(printed: str) -> tuple[int, int] | None:
    """Return how many operations there were, and how many through the host; or None.

    ``gds_stats -l 3`` prints ``GPU 0 Read: ... n=7302 posix=0 ... Write: ... n=0 posix=0 ...``.
    """
    pairs = re.findall(r"\b(?:Read|Write):[^:]*?\bn=(\d+)\s+posix=(\d+)", printed)
    if not pairs:
        return None
    return sum(int(total) for total, _ in pairs), sum(int(through_host) for _, through_host in pairs)


@check("calibration")
def calibration(host: Host, place: Place) -> Answer:
    """Look up an earlier measurement (`gdsdata.io.calibration`)."""
    if place.silence:
        return unknown(place.silence)
    found = host.probe("calibration", place.path)
    if found is None or "place" not in found:
        return unknown((found or {}).get("error", "it was not looked for"))
    kept = found["kept"]
    if kept is None:
        evidence, command = f"nothing is kept for {found['place']}", "python -m gdsdata.io.calibration FILE"
        if found.get("given_up"):
            evidence += ": within the last day a measurement failed, was disturbed, or took longer than 0.3 s"
            return unknown(evidence, f"{command} measures without a limit of time")
        remedy = (
            "it is measured when a data set of 256 MiB and more is opened for this GPU, if that takes no longer than "
            f"0.3 s; beforehand by {command}"
        )
        return unknown(evidence, remedy)
    said = ", ".join(
        f"{name}={kept[name] or 'default'}" for name in ("backend", "workers", "queue_depth", "segment_bytes")
    )
    rates = ", ".join(f"{rate} GB/s ({what})" for what, rate in kept["gb_per_s"].items())
    best = kept["backend"] == "auto" or gds(host, place).answer == "yes"
    evidence = f"{found['place']}: {said}; measured in {kept['seconds']} s: {rates}"
    if not best:
        return no(
            evidence + "; cuFile was the best then, and is not available now",
            "repair GPUDirect Storage, or delete this calibration",
        )
    return yes(evidence)
