"""Checks of a path's file system, and of its disk's records."""

from __future__ import annotations

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.place import Mount, Place
from gdsdata.io.file_systems import NETWORK_KINDS

_RDMA_PORT = "20049"
_NFS_VERSIONS = ("3", "4.0")
# Clients that transfer to GPUs themselves (gdscheck -p lists them), with the product's name.
_VENDORS = {"lustre": "Lustre", "wekafs": "WekaFS", "beegfs": "BeeGFS", "gpfs": "IBM Storage Scale"}


@check("file system for cuFile")
def file_system(host: Host, place: Place) -> Answer:
    """Compare the mount with the file systems that cuFile supports.

    These are local ext4 in ordered mode, local xfs, NFS over RDMA (port 20049, version 3 or 4.0),
    Lustre, WekaFS, BeeGFS and IBM Storage Scale. Others work through the host, which is slower.
    Source: GPUDirect Storage troubleshooting guide, "ext4: data=ordered" and "NFS over RDMA"; its
    release notes, "Support Matrix".
    """
    mount = place.mount
    if mount is None:
        return unknown("/proc/self/mountinfo does not say")
    said = f"{mount.kind} at {mount.at}"
    if place.silence:
        remedy = place.remedy or "see that its server is there; umount -f -l frees those who wait for it"
        return no(f"{said}: {place.silence}", remedy)
    if mount.kind in ("nfs", "nfs4"):
        return _nfs(mount, said)
    if mount.kind == "ext4":
        return _ext4(host, place, said)
    if mount.kind == "xfs":
        return yes(said)
    if mount.kind in _VENDORS:
        return yes(f"{said}: {_VENDORS[mount.kind]}, by its own client")
    for kinds, why, remedy in (
        (("tmpfs", "ramfs", "devtmpfs"), "memory, not a disk", "put data on ext4 or xfs to go direct"),
        (("overlay",), "a container's layers", "mount a volume of the host's for the data: docker run -v /data:/data"),
        (
            ("btrfs",),
            "not among cuFile's, and with checksums O_DIRECT is buffered",
            "ext4 or xfs; or chattr +C (nodatasum)",
        ),
        (("zfs",), "not among cuFile's", "put data on ext4 or xfs"),
        (("virtiofs", "9p"), "the host's files, seen through a virtual machine", "give the machine a disk of its own"),
    ):
        if mount.kind in kinds:
            return no(f"{said}: {why}", remedy)
    if mount.kind.startswith("fuse"):
        return no(
            f"{said}: a program in user space copies every byte", "mount it by a client in the kernel, or copy it"
        )
    if mount.kind in NETWORK_KINDS:
        return no(f"{said}: not among cuFile's network file systems", "bytes go by way of the host")
    return unknown(f"{said}: not known to gdsdata")


def _nfs(mount: Mount, said: str) -> Answer:
    protocol, version = mount.options.get("proto", "tcp"), mount.options.get("vers", "")
    port = mount.options.get("port", _RDMA_PORT if protocol == "rdma" else "")
    said += f", proto={protocol}{f', port={port}' if port else ''}, vers={version or '?'}"
    remedy = f"mount -o proto=rdma,port={_RDMA_PORT},vers=3 (or vers=4.0) {mount.source} {mount.at}"
    if protocol != "rdma" or port != _RDMA_PORT or (version and version not in _NFS_VERSIONS):
        return no(said, remedy)
    return yes(said) if version else unknown(said, remedy)


def _ext4(host: Host, place: Place, said: str) -> Answer:
    """Check ext4's mode. Only /proc/fs/ext4 shows data= if it is the default."""
    mode = place.mount.options.get("data") if place.mount else None
    shown = mode is not None
    if mode is None:
        lines = (host.text(f"/proc/fs/ext4/{place.block}/options") or "").splitlines()
        mode = next((line.partition("=")[2] for line in lines if line.startswith("data=")), "ordered")
    if mode != "ordered":
        return no(f"{said}, data={mode}", "mount -o remount is not enough: umount, then mount -o data=ordered")
    return yes(f"{said}, data=ordered{'' if shown else ' (the default)'}")


@check("O_DIRECT")
def direct(host: Host, place: Place) -> Answer:
    """Read with O_DIRECT, as the engine does.

    A file system may refuse it at open or at the first read: tmpfs before Linux 6.6, FUSE, some
    overlays.
    """
    if place.silence:
        return unknown(place.silence)
    found = host.probe("direct", place.path)
    if found is None:
        return unknown("it was not tried")
    if "error" not in found:
        return yes(f"{found['bytes']} bytes were read with it")
    if found.get("refused"):
        return no(found["error"], "files are read through the page cache; local ext4 and xfs allow it")
    return unknown(found["error"], "name a file that may be read, or a folder that may be written")


@check("O_DIRECT's alignment")
def alignment(host: Host, place: Place) -> Answer:
    """Find the alignment that O_DIRECT needs.

    statx(2) reports it from Linux 6.1 on (STATX_DIOALIGN), and 0 if O_DIRECT does not work on the
    file. The disk's logical block is always enough (open(2), "O_DIRECT").
    """
    found = (None if place.silence else host.probe("alignment", place.path)) or {}
    if "offset_bytes" in found:
        memory, offset = found["memory_bytes"], found["offset_bytes"]
        if offset == 0:
            return no("statx: 0, direct I/O does not work on this file", "see the file system above")
        return yes(f"statx: memory {memory} bytes, offsets {offset} bytes")
    for folder in (place.block, f"{place.block}/.."):  # a partition's queue is its disk's
        size = host.number(f"/sys/class/block/{folder}/queue/logical_block_size") if place.block else None
        if size:
            return yes(f"logical block of {place.block}: {size} bytes (statx does not say)")
    return unknown(found.get("error", "statx does not say, and no disk is known"), "a page is assumed")


@check("udev record of the disk")
def udev(host: Host, place: Place) -> Answer:
    """Check that udev's record of the disk has ID_FS_USAGE.

    Without it cuFile refuses the file with 5027 or 5030 ("udev property not found: ID_FS_USAGE" in
    cufile.log; LMCache issue 795). A container has no records unless the host's are mounted. They
    are /run/udev/data/bMAJOR:MINOR, with E:NAME=VALUE lines (systemd, sd-device).
    """
    if not place.block:
        if place.mount and place.mount.kind in NETWORK_KINDS:
            return yes(f"{place.mount.kind} has no disk here, and needs none")
        return unknown("no block device of this machine is below the path")
    device = host.text(f"/sys/class/block/{place.block}/dev") or (place.mount.device if place.mount else "")
    record = host.text(f"/run/udev/data/b{device}")
    remedy = "in a container: docker run -v /run/udev:/run/udev:ro; else start systemd-udevd and: udevadm trigger"
    if record is None:
        return no(f"there is no /run/udev/data/b{device} for {place.block}", remedy)
    usage = next((line for line in record.splitlines() if line.startswith("E:ID_FS_USAGE=")), None)
    if usage is None:
        return no(f"/run/udev/data/b{device} for {place.block} has no ID_FS_USAGE", remedy)
    return yes(f"{place.block}: {usage[2:]}")
