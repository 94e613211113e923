"""The place of a path: its mount, its block device, and PCI devices that serve it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from gdsdata.doctor.evidence import Host
from gdsdata.io.file_systems import NETWORK_KINDS

_PCI_DEVICE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo.

    Attributes:
        at: where it is mounted.
        device: "major:minor".
        kind: of the file system.
        source: what is mounted.
        options: by name.
    """

    at: str
    device: str
    kind: str
    source: str
    options: dict[str, str]


@dataclass(frozen=True)
class Place:
    """A path, and what serves it.

    Attributes:
        path: absolute, with links followed if the file system answers.
        silence: why the file system does not answer; empty if it does.
        mount: None if no mount is known.
        block: name of its block device ("nvme0n1p1"); empty for a network, or memory.
        controllers: addresses of PCI devices that its bytes come from: disks, or the RDMA devices
            of a network.
        remedy: of the silence.
    """

    path: str
    silence: str = ""
    mount: Mount | None = None
    block: str = ""
    controllers: tuple[str, ...] = ()
    remedy: str = ""


def place_of(host: Host, path: str, silence: str = "", remedy: str = "") -> Place:
    """Find what serves a path, without its file system, which may be dead."""
    mount = _mount_of(host, path)
    block = _block_of(host, mount) if mount else ""
    found = sorted({pci for disk in _disks_below(host, block) for pci in _controllers(host, disk)}) if block else []
    if mount and mount.kind in NETWORK_KINDS:
        found = sorted(set(rdma_devices(host).values()))
    return Place(path, silence, mount, block, tuple(found), remedy)


def mounts(host: Host) -> list[Mount]:
    """Return all mounts in the order of mounting. Format: proc_pid_mountinfo(5)."""
    found = []
    for line in (host.text("/proc/self/mountinfo") or "").splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(), after.split(" ")
        if not dash or len(fields) < 6 or len(rest) < 2:
            continue
        options = {}
        for option in [*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else [])]:
            name, _, value = option.partition("=")
            options[name] = value
        found.append(Mount(_unescaped(fields[4]), fields[2], rest[0], _unescaped(rest[1]), options))
    return found


def _mount_of(host: Host, path: str) -> Mount | None:
    """Return a path's innermost mount.

    If several are at one place, the last one hides the others.
    """
    best = None
    for mount in mounts(host):
        holds = (path.rstrip("/") + "/").startswith(mount.at.rstrip("/") + "/")
        if holds and (best is None or len(mount.at) >= len(best.at)):
            best = mount
    return best


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _block_of(host: Host, mount: Mount) -> str:
    """Find a mount's block device by its number, or by what is mounted.

    btrfs has device numbers of its own.
    """
    real = host.real(f"/sys/dev/block/{mount.device}")
    if real:
        return os.path.basename(real)
    if not mount.source.startswith("/dev/"):
        return ""
    name = os.path.basename(mount.source)
    if host.exists(f"/sys/class/block/{name}"):
        return name
    mapped = (disk for disk in host.names("/sys/class/block") if disk.startswith("dm-"))
    return next((disk for disk in mapped if host.text(f"/sys/class/block/{disk}/dm/name") == name), "")


def _disks_below(host: Host, block: str) -> list[str]:
    """Return sysfs folders of the whole disks below a partition, RAID or volume."""
    real = host.real(f"/sys/class/block/{block}")
    if real is None:
        return []
    parts = host.names(f"{real}/slaves")
    if parts:
        return [disk for part in parts for disk in _disks_below(host, part)]
    return [os.path.dirname(real) if host.exists(f"{real}/partition") else real]


def _controllers(host: Host, disk: str) -> list[str]:
    """Return a disk's PCI device, or those of all controllers of an NVMe namespace."""
    chain = _PCI_DEVICE.findall(disk)
    if chain:
        return chain[-1:]
    siblings = (name for name in host.names(os.path.dirname(disk)) if re.fullmatch(r"nvme\d+", name))
    paths = (host.real(f"/sys/class/nvme/{name}") or "" for name in siblings)
    return [chain[-1] for chain in map(_PCI_DEVICE.findall, paths) if chain]


def rdma_devices(host: Host) -> dict[str, str]:
    """Return the addresses of the PCI devices in /sys/class/infiniband, by name."""
    chains = {
        nic: pci_chain(host, f"/sys/class/infiniband/{nic}/device") for nic in host.names("/sys/class/infiniband")
    }
    return {nic: chain[-1] for nic, chain in chains.items() if chain}


def pci_chain(host: Host, path: str) -> list[str]:
    """Return a PCI device's address behind those of its bridges, the root port first.

    Empty if it is no PCI device.
    """
    return _PCI_DEVICE.findall(host.real(path) or "")


def gpus(host: Host) -> list[str]:
    """Return the addresses of NVIDIA's display and 3-D controllers (vendor 0x10de)."""
    folder = "/sys/bus/pci/devices"
    return [
        address
        for address in host.names(folder)
        if host.text(f"{folder}/{address}/vendor") == "0x10de"
        and (host.text(f"{folder}/{address}/class") or "")[:6] in ("0x0300", "0x0302")
    ]
