"""Every check of the doctor on recorded evidence: what makes it say yes, no, and unknown."""

import functools
import json
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest
from helpers import REPOSITORY

from gdsdata.doctor import CHECKS, RecordedHost, ThisHost, diagnose, system, works
from gdsdata.doctor.pcie import _acs_by_lspci, between
from gdsdata.doctor.place import mounts, place_of
from gdsdata.doctor.probes import LIMITS_S, PROBES
from gdsdata.doctor.serving import cufile_operations

ARCHIVES = Path(__file__).parent / "evidence"
PATHS = {
    "nfs_rdma": "/mnt/data/train.bin",
    "local_nvme": "/mnt/fast/train.bin",
    "container": "/data/train.bin",
    "laptop": "/home/ada/train.bin",
}
BY_NAME = {check.__name__: check for group in CHECKS.values() for check in group}
ROUTES = dict.fromkeys(["page_cache", "direct", "buffered", "gds", "gds_compat", "pinned_page_cache"], 0)


@functools.cache
def unpacked():
    """A folder for this process's recorded hosts; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="gdsdata-evidence-")


@functools.cache
def recorded(name):
    """The folder of a recorded host, out of its archive."""
    with tarfile.open(ARCHIVES / f"{name}.tar.gz") as archive:
        archive.extractall(unpacked().name, filter="data")
    return Path(unpacked().name) / name


def copied(tmp_path, name):
    return shutil.copytree(recorded(name), tmp_path / name, symlinks=True)


def amended(tmp_path, name, changes):
    """A copy of a recorded host with other texts in some files (a dict is JSON), or without them
    (None).
    """
    folder = copied(tmp_path, name)
    for path, text in changes.items():
        place = folder / path
        if text is None:
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(text) if isinstance(text, dict) else text)
    return RecordedHost(folder)


def finding(host, check, path, silence=""):
    return BY_NAME[check](host, place_of(host, path, silence))


def uses(machine, *names):
    return {"probes/processor.json": {"machine": machine, "uses": names}}


def mounted(name, line):
    """The host's mounts, and one more above its path."""
    return {"proc/self/mountinfo": (recorded(name) / "proc/self/mountinfo").read_text() + line + "\n"}


NFS = (
    "500 29 0:60 / /mnt/data rw,relatime shared:300 - {kind} 172.16.8.20:/train rw,vers={vers},hard,proto={proto}{port}"
)
EXT4 = "500 29 259:5 / /mnt/fast rw,relatime shared:300 - ext4 /dev/nvme1n1p1 rw"
ELSEWHERE = "500 29 0:60 / {at} rw,relatime shared:300 - {kind} {source} rw"
OSRELEASE = "6.8.0-79-generic"
P2PDMA = '{"properties": {"use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}} /* both */ } // end'
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs)\n"
NO_NVFS = {"proc/driver/nvidia-fs": None}
NVME_GPU = "sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0"
NVME_DISK = "sys/devices/pci0000:60/0000:60:03.1/0000:61:00.0"

MLX = "sys/class/infiniband/mlx5_{}/ports/1/{}"
SMI = "tools/nvidia-smi --query-gpu=name,compute_cap,pci.bus_id --format=csv,noheader"
NVIDIA_GPUS = ["0000:1b:00.0", "0000:bb:00.0"]
LSPCI = """{bridge} PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 1483 (prog-if 00 [Normal decode])
	Capabilities: [2a0 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
		ACSCtl:	{control}
	Kernel driver in use: pcieport

"""
HIDDEN = "{bridge} PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 1483\n\tCapabilities: <access denied>\n\n"
ON = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
OFF = "SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-"


def both_bridges(form, **values):
    return {"tools/lspci -D -vv": "".join(form.format(bridge=b, **values) for b in ("0000:40:01.1", "0000:60:03.1"))}


def slice_of_v2(own, limited):
    """A process in a control group of version 2, seen from outside of it, and one with a limit."""
    mount = "31 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    return {
        **mounted("nfs_rdma", mount),
        "proc/self/cgroup": f"0::{own}\n",
        f"sys/fs/cgroup/{limited}/memory.max": "134217728\n",
    }


def slice_of_v1(own, limited):
    mount = "32 22 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:5 - cgroup cgroup rw,memory"
    return {
        **mounted("nfs_rdma", mount),
        "sys/fs/cgroup/memory.max": None,
        "proc/self/cgroup": f"4:cpu,cpuacct:/x\n3:memory:{own}\n",
        f"sys/fs/cgroup/memory/{limited}/memory.limit_in_bytes": "134217728\n",
    }


def in_user_namespace(capabilities):
    return {"proc/self/status": f"CapEff:\t{capabilities}\n", "proc/self/uid_map": "         0       1000          1\n"}


# By check: answer, host, what is otherwise there, what the evidence has to name.
CASES = {
    "reading": [
        ("yes", "local_nvme", {}, "65536 bytes by direct, into cuda:0"),
        ("no", "local_nvme", {"probes/reading.json": {"error": "could not read: Input/output error"}}, "Input/output"),
        ("unknown", "local_nvme", {"probes/reading.json": {"error": "it is empty", "empty": True}}, "empty"),
        ("unknown", "local_nvme", {"probes/reading.json": None}, "not tried"),
    ],
    "gds": [
        ("yes", "nfs_rdma", {}, "65536 bytes went by DMA"),
        ("no", "container", {}, "neither nvidia-fs nor P2PDMA"),
        (
            "no",
            "nfs_rdma",
            {"probes/gds.json": {"bytes": {**ROUTES, "gds_compat": 65536}}},
            "65536 bytes by gds_compat",
        ),
        ("unknown", "nfs_rdma", {"probes/gds.json": {"error": "no answer within 30 s", "timed_out": True}}, "30 s"),
        ("unknown", "nfs_rdma", {"probes/gds.json": None}, "not tried"),
    ],
    "file_system": [
        ("yes", "nfs_rdma", {}, "nfs at /mnt/data, proto=rdma, port=20049, vers=3"),
        (
            "yes",
            "nfs_rdma",
            mounted("nfs_rdma", NFS.format(kind="nfs4", vers="4.0", proto="rdma", port=",port=20049")),
            "4.0",
        ),
        ("no", "nfs_rdma", mounted("nfs_rdma", NFS.format(kind="nfs", vers="3", proto="tcp", port="")), "proto=tcp"),
        (
            "no",
            "nfs_rdma",
            mounted("nfs_rdma", NFS.format(kind="nfs4", vers="4.2", proto="rdma", port=",port=20049")),
            "4.2",
        ),
        (
            "no",
            "nfs_rdma",
            mounted("nfs_rdma", NFS.format(kind="nfs", vers="3", proto="rdma", port=",port=2049")),
            "2049",
        ),
        ("yes", "local_nvme", {}, "ext4 at /mnt/fast, data=ordered"),
        ("yes", "local_nvme", mounted("local_nvme", EXT4), "data=ordered (the default)"),
        ("no", "local_nvme", mounted("local_nvme", EXT4 + ",data=journal"), "data=journal"),
        (
            "no",
            "local_nvme",
            {**mounted("local_nvme", EXT4), "proc/fs/ext4/nvme1n1p1/options": "rw\nbarrier\ndata=writeback\n"},
            "data=writeback",
        ),
        ("yes", "local_nvme", mounted("local_nvme", EXT4.replace("ext4", "xfs")), "xfs"),
        *(
            (
                answer,
                "local_nvme",
                mounted("local_nvme", ELSEWHERE.format(at="/mnt/fast", kind=kind, source=kind)),
                says,
            )
            for answer, kind, says in [
                ("yes", "lustre", "Lustre"),
                ("yes", "wekafs", "WekaFS"),
                ("yes", "beegfs", "BeeGFS"),
                ("yes", "gpfs", "IBM Storage Scale"),
                ("no", "tmpfs", "memory"),
                ("no", "overlay", "layers"),
                ("no", "fuse.rclone", "user space"),
                ("no", "btrfs", "checksums"),
                ("no", "ceph", "network"),
                ("unknown", "nilfs2", "not known"),
            ]
        ),
        ("unknown", "laptop", {"proc/self/mountinfo": None}, "mountinfo"),
    ],
    "direct": [
        ("yes", "container", {}, "65536 bytes"),
        ("no", "container", {"probes/direct.json": {"error": "Invalid argument", "refused": True}}, "Invalid argument"),
        ("unknown", "container", {"probes/direct.json": {"error": "it has 5 bytes, too few to tell"}}, "too few"),
        ("unknown", "container", {"probes/direct.json": None}, "not tried"),
    ],
    "alignment": [
        ("yes", "local_nvme", {}, "memory 4 bytes, offsets 512 bytes"),
        ("yes", "local_nvme", {"probes/alignment.json": None}, "logical block of nvme1n1p1: 512 bytes"),
        ("no", "local_nvme", {"probes/alignment.json": {"memory_bytes": 0, "offset_bytes": 0}}, "does not work"),
        ("unknown", "nfs_rdma", {}, "does not say"),
    ],
    "udev": [
        ("yes", "local_nvme", {}, "ID_FS_USAGE=filesystem"),
        ("yes", "laptop", {}, "dm-0: ID_FS_USAGE=filesystem"),
        ("yes", "nfs_rdma", {}, "needs none"),
        ("no", "container", {}, "/run/udev/data/b259:2"),
        ("no", "local_nvme", {"run/udev/data/b259:5": "E:ID_FS_TYPE=ext4\n"}, "no ID_FS_USAGE"),
        ("unknown", "laptop", {"sys/class/block": None}, "no block device"),
    ],
    "disk_link": [
        ("yes", "laptop", {}, "WD PC SN810 SDCPNRY-1T00): 16 GT/s x4 of 16 GT/s x4"),
        ("no", "local_nvme", {}, "SAMSUNG MZQL23T8HCLS-00A07): 16 GT/s x2 of 16 GT/s x4"),
        (
            "no",
            "local_nvme",
            {f"{NVME_DISK}/current_link_width": "4\n", f"{NVME_DISK}/current_link_speed": "8.0 GT/s PCIe\n"},
            "8 GT/s x4 of 16",
        ),
        ("unknown", "container", {}, "the link is not visible"),
        ("unknown", "nfs_rdma", {}, "no NVMe disk"),
    ],
    "calibration": [
        ("yes", "nfs_rdma", {}, "backend=cufile, workers=16"),
        ("no", "nfs_rdma", {"probes/gds.json": {"error": "neither"}}, "not available now"),
        ("unknown", "container", {}, "nothing is kept for NVIDIA L4"),
        ("unknown", "laptop", {}, "CPU"),
    ],
    "gpu": [
        ("yes", "container", {}, "cuda:0 is current: NVIDIA L4"),
        ("no", "laptop", {}, "sees none"),
        ("unknown", "container", {"probes/gpu.json": {"error": "no answer within 30 s", "timed_out": True}}, "30 s"),
    ],
    "driver": [
        ("yes", "nfs_rdma", {}, "both are 570.86.15"),
        ("yes", "local_nvme", {}, "both are 535.161.08"),
        ("no", "laptop", {}, "no /proc/driver/nvidia/version"),
        ("unknown", "laptop", {"dev/dxg": ""}, "Windows has the driver"),
        ("no", "local_nvme", {"proc/driver/nvidia/version": OPEN_DRIVER}, "module 570.86.15, libcuda 535.161.08"),
        ("unknown", "local_nvme", {"tools/ldconfig -p": "0 libs found in cache `/etc/ld.so.cache'\n"}, "not found"),
    ],
    "cuda": [
        ("yes", "container", {}, "CUDA 12.6, driver with CUDA 12.2"),
        ("no", "laptop", {}, "without CUDA"),
        (
            "no",
            "container",
            {"probes/cuda.json": {"torch": "2.15.0", "torch_cuda": "13.0", "driver_cuda": 12080}},
            "driver with CUDA 12.8",
        ),
        (
            "unknown",
            "container",
            {"probes/cuda.json": {"torch": "2.15.0", "torch_cuda": "13.0", "driver_cuda": 0}},
            "no libcuda.so.1",
        ),
    ],
    "gpu_supported": [
        ("yes", "nfs_rdma", {}, "NVIDIA H100 80GB HBM3 (9.0)"),
        ("no", "laptop", {}, "no NVIDIA GPU"),
        ("no", "container", {SMI: "NVIDIA GeForce RTX 4090, 8.9, 00000000:00:1E.0\n"}, "GeForce"),
        ("no", "container", {SMI: "Tesla M40, 5.2, 00000000:00:1E.0\n"}, "5.2"),
        ("yes", "container", {SMI: "NVIDIA H200, [N/A], 00000000:00:1E.0\n"}, "[N/A]"),
        ("unknown", "container", {SMI: None}, "nvidia-smi"),
    ],
    "bar1": [
        ("yes", "nfs_rdma", {}, "131072 MiB"),
        ("yes", "local_nvme", {}, "65536 MiB"),
        (
            "no",
            "local_nvme",
            {
                f"{NVME_GPU}/resource": "0x00000000a8000000 0x00000000a8ffffff 0x0000000000040200\n"
                "0x0000010000000000 0x000001000fffffff 0x000000000014220c\n"
            },
            "256 MiB",
        ),
        ("unknown", "local_nvme", {f"{NVME_GPU}/resource": None}, "resources"),
        ("unknown", "laptop", {}, "no GPU"),
    ],
    "peer_to_peer": [
        ("yes", "nfs_rdma", {}, "nvidia-fs 2.24, registered with it: nvme, rpcrdma"),
        ("no", "nfs_rdma", {"proc/driver/nvidia-fs/modules": "nvme: 1.0\n"}, "rpcrdma has not registered (nvme)"),
        ("no", "container", {}, "nvidia-fs is not loaded"),
        (
            "no",
            "nfs_rdma",
            {"etc/cufile.json": '{"properties": {"force_compat_mode": true}}'},
            "is forced (/etc/cufile.json",
        ),
        ("no", "nfs_rdma", {"environ": "CUFILE_FORCE_COMPAT_MODE=true"}, "is forced"),
        ("no", "container", {"etc/cufile.json": '{"properties": {'}, "/etc/cufile.json (not valid JSON"),
        ("no", "container", {"etc/cufile.json": '{"properties": [1], "block": 2}'}, "has no use_pci_p2pdma"),
        (
            "no",
            "local_nvme",
            {**NO_NVFS, "etc/cufile.json": '{"properties": {"use_pci_p2pdma": true}, "block": [], "fs": null}'},
            "block.nvme.use_pci_p2pdma is not true",
        ),
        (
            "yes",
            "local_nvme",
            {
                **NO_NVFS,
                "etc/cufile.json": P2PDMA,
                "proc/driver/nvidia/version": OPEN_DRIVER,
                f"boot/config-{OSRELEASE}": "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n",
            },
            "kernel 6.8.0-79-generic has it",
        ),
        (
            "no",
            "local_nvme",
            {
                **NO_NVFS,
                "etc/cufile.json": P2PDMA,
                "proc/driver/nvidia/version": OPEN_DRIVER,
                f"boot/config-{OSRELEASE}": "# CONFIG_PCI_P2PDMA is not set\n",
            },
            "no CONFIG_PCI_P2PDMA",
        ),
        ("no", "local_nvme", {**NO_NVFS, "etc/cufile.json": P2PDMA}, "not the open one"),
        (
            "no",
            "local_nvme",
            {**NO_NVFS, "etc/cufile.json": '{"properties": {"use_pci_p2pdma": true}}'},
            "block.nvme.use_pci_p2pdma is not true",
        ),
        (
            "no",
            "local_nvme",
            {
                **NO_NVFS,
                "etc/cufile.json": '{"properties": {"use_pci_p2pdma": true}, '
                '"fs": {"block": {"nvme": {"use_pci_p2pdma": true}}}}',
            },
            "inside fs",
        ),
        (
            "unknown",
            "local_nvme",
            {
                **NO_NVFS,
                "proc/driver/nvidia/version": OPEN_DRIVER,
                "my.json": P2PDMA,
                "environ": "CUFILE_ENV_PATH_JSON=/my.json",
            },
            "configured in /my.json; the configuration of kernel 6.8.0-79-generic cannot be read",
        ),
    ],
    "cufile": [
        ("yes", "nfs_rdma", {}, "version 1.13.0"),
        ("yes", "container", {}, "version 1.11.1.6"),
        ("no", "laptop", {}, "no libcufile.so.0"),
        (
            "yes",
            "laptop",
            {"environ": "LD_LIBRARY_PATH=/opt/lib", "opt/lib/libcufile.so.0": ""},
            "/opt/lib/libcufile.so.0",
        ),
        (
            "no",
            "nfs_rdma",
            {"environ": "GDSDATA_LIBCUFILE=/opt/libcufile.so.0\n"},
            "/opt/libcufile.so.0, which is not there",
        ),
        ("unknown", "laptop", {"tools/ldconfig -p": None}, "neither"),
    ],
    "fallback": [
        ("yes", "nfs_rdma", {}, "102400 operations went through nvidia-fs"),
        (
            "no",
            "nfs_rdma",
            {
                "proc/driver/nvidia-fs/stats": "IO stats: Enabled, peer IO stats: Enabled\nActive Process: 2\n"
                "Reads				: n=0 ok=0 err=0 readMiB=0 io_state_err=0\n"
            },
            "0 operations went through nvidia-fs, 2 processes use it",
        ),
        ("unknown", "local_nvme", {}, "disabled"),
        ("unknown", "laptop", {}, "no /proc/driver/nvidia-fs/stats"),
    ],
    "iommu": [
        ("yes", "nfs_rdma", {}, "iommu=pt; identity"),
        ("no", "local_nvme", {}, "amd_iommu=on; DMA-FQ"),
        ("yes", "local_nvme", {f"{NVME_GPU}/iommu_group": None, "proc/cmdline": "ro iommu=pt"}, "iommu=pt"),
        ("unknown", "local_nvme", {f"{NVME_GPU}/iommu_group": None}, "not visible"),
        ("unknown", "laptop", {}, "no GPU"),
        ("unknown", "container", {}, "/sys/class/iommu is not visible"),
    ],
    "acs": [
        ("yes", "nfs_rdma", {}, "8 bridges above GPUs and storage, on none of them"),
        ("yes", "container", {}, "no bridge"),
        ("no", "local_nvme", {}, "on at 0000:40:01.1, 0000:60:03.1 (/proc/driver/nvidia-fs/bridges)"),
        ("yes", "local_nvme", {"proc/driver/nvidia-fs/bridges": "0000:00:01.0\n"}, "2 bridges"),
        ("no", "local_nvme", {**NO_NVFS, **both_bridges(LSPCI, control=ON)}, "0000:40:01.1, 0000:60:03.1 (lspci -vv)"),
        ("yes", "local_nvme", {**NO_NVFS, **both_bridges(LSPCI, control=OFF)}, "lspci -vv"),
        ("unknown", "local_nvme", {**NO_NVFS, **both_bridges(HIDDEN)}, "root alone"),
        ("unknown", "local_nvme", NO_NVFS, "lspci is missing"),
    ],
    "distance": [
        ("yes", "nfs_rdma", {}, "GPU 0000:1b:00.0 and mlx5_0: same switch; GPU 0000:bb:00.0 and mlx5_1: same switch"),
        ("yes", "local_nvme", {}, "GPU 0000:41:00.0 and nvme1: same node"),
        ("yes", "container", {}, "GPU 0000:00:1e.0 and nvme0: same root"),
        ("no", "local_nvme", {f"{NVME_DISK}/numa_node": "1\n"}, "GPU 0000:41:00.0 and nvme1: other node"),
        ("unknown", "local_nvme", {f"{NVME_DISK}/numa_node": "-1\n"}, "distance unknown"),
        ("unknown", "laptop", {}, "no GPU"),
    ],
    "numa": [
        ("yes", "nfs_rdma", {}, "cores 0-111"),
        ("no", "nfs_rdma", {"proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,8\n"}, "no core of node 1"),
        ("unknown", "container", {}, "no device says"),
        ("unknown", "nfs_rdma", {"sys/devices/system/node": None}, "cores are not visible"),
    ],
    "rdma": [
        ("yes", "nfs_rdma", {}, "mlx5_0/1 ACTIVE, 400 Gb/sec (4X NDR), Ethernet"),
        ("yes", "nfs_rdma", {MLX.format(1, "state"): "1: DOWN\n"}, "mlx5_1/1 DOWN"),
        ("no", "nfs_rdma", {MLX.format(0, "state"): "1: DOWN\n", MLX.format(1, "state"): "2: INIT\n"}, "INIT"),
        ("no", "nfs_rdma", {"sys/class/infiniband": None}, "there is no RDMA device"),
        ("unknown", "local_nvme", {}, "needs none"),
        (
            "unknown",
            "container",
            mounted("container", ELSEWHERE.format(at="/data", kind="9p", source="share")),
            "9p needs none",
        ),
        ("yes", "nfs_rdma", {MLX.format(0, "rate"): None}, "mlx5_0/1 ACTIVE, rate unknown, Ethernet"),
    ],
    "pause_frames": [
        ("yes", "nfs_rdma", {}, "mlx5_0: 1247 pause frames, 0 out of sequence"),
        (
            "yes",
            "nfs_rdma",
            {MLX.format(card, "link_layer"): "InfiniBand\n" for card in (0, 1)},
            "credits",
        ),
        (
            "unknown",
            "nfs_rdma",
            {MLX.format(card, "link_layer"): "Unspecified\n" for card in (0, 1)},
            "mlx5_0, mlx5_1: neither",
        ),
        ("no", "nfs_rdma", {MLX.format(1, "hw_counters/out_of_sequence"): "90317\n"}, "90317 out of sequence"),
        (
            "unknown",
            "nfs_rdma",
            {"tools/ethtool -S ens1np0": None, "tools/ethtool -a ens1np0": None},
            "mlx5_0: unknown",
        ),
        (
            "yes",
            "nfs_rdma",
            {"tools/ethtool -S ens1np0": None, "tools/ethtool -a ens1np0": "RX:\t\ton\nTX:\t\ton"},
            "mlx5_0",
        ),
        ("unknown", "laptop", {}, "no RDMA device is up"),
    ],
    "io_uring": [
        ("yes", "laptop", {}, "the engine runs on it, 8 workers"),
        ("no", "container", {}, "this process has a seccomp filter"),
        ("no", "laptop", {"probes/io_uring.json": None, "proc/sys/kernel/io_uring_disabled": "2\n"}, "disabled=2"),
        ("unknown", "container", {"probes/io_uring.json": None}, "a seccomp filter may forbid it"),
    ],
    "vector_instructions": [
        ("yes", "laptop", uses("x86_64", "avx", "avx2", "pclmul", "crc32c"), "uses avx, avx2, pclmul, crc32c"),
        ("yes", "laptop", uses("aarch64", "crc32c"), "uses crc32c"),
        (
            "no",
            "laptop",
            uses("x86_64", "crc32c") | {"proc/cpuinfo": "flags\t: sse4_2\n"},
            "the engine lacks avx2, pclmul",
        ),
        (
            "no",
            "laptop",
            uses("x86_64", "pclmul", "crc32c") | {"proc/cpuinfo": "flags\t\t: sse4_2 avx2\n"},
            "the engine lacks avx2; /proc/cpuinfo has avx2",
        ),
        ("no", "laptop", uses("aarch64") | {"proc/cpuinfo": "Features\t: fp crc32\n"}, "/proc/cpuinfo has crc32"),
        ("unknown", "laptop", uses("riscv64"), "riscv64"),
        ("unknown", "laptop", {}, "the engine was not asked"),
    ],
    "locked_memory": [
        ("yes", "nfs_rdma", {}, "unlimited"),
        ("yes", "laptop", {"proc/self/status": "CapEff:\t000001ffffffffff\n"}, "CAP_IPC_LOCK"),
        ("no", "container", {}, "limit 67108864 bytes; control group 34.4 GB"),
        ("yes", "laptop", {"proc/self/limits": "Max locked memory  33554432  33554432  bytes\n"}, "limit 33554432"),
        ("no", "laptop", {"proc/self/limits": "Max locked memory  33554431  33554431  bytes\n"}, "limit 33554431"),
        ("no", "nfs_rdma", {"sys/fs/cgroup/memory.max": "134217728\n"}, "control group 0.1 GB"),
        ("no", "nfs_rdma", slice_of_v2("/user.slice/job.scope", "user.slice"), "control group 0.1 GB"),
        ("no", "nfs_rdma", slice_of_v2("/user.slice/job.scope", "user.slice/job.scope"), "control group 0.1 GB"),
        ("no", "nfs_rdma", slice_of_v1("/slurm/job_7", "slurm/job_7"), "control group 0.1 GB"),
        ("yes", "nfs_rdma", slice_of_v2("/user.slice/job.scope", "other.slice"), "unlimited"),
        ("no", "laptop", in_user_namespace("000001ffffffffff"), "limit 8388608 bytes"),
        ("unknown", "laptop", {"proc/self/limits": None}, "/proc/self/limits"),
    ],
    "security": [
        ("yes", "nfs_rdma", {}, "no lockdown"),
        ("no", "container", {}, "AppArmor enforces docker-default (enforce); a seccomp filter"),
        ("no", "nfs_rdma", {"proc/self/attr/apparmor/current": "mine (enforce)\n"}, "AppArmor enforces mine (enforce)"),
        ("no", "laptop", {}, "kernel lockdown: integrity"),
        (
            "no",
            "laptop",
            {"proc/self/attr/current": "system_u:system_r:container_t:s0:c1,c2"},
            "SELinux enforces system_u:system_r:container_t",
        ),
        ("unknown", "nfs_rdma", {"proc/self/status": None}, "/proc/self/status"),
    ],
}
ALL_CASES = [
    pytest.param(check, *case, id=f"{check}-{case[0]}-{number}")
    for check, cases in CASES.items()
    for number, case in enumerate(cases)
]


@pytest.mark.parametrize(("check", "answer", "name", "changes", "says"), ALL_CASES)
def test_check_says(tmp_path, check, answer, name, changes, says):
    host = amended(tmp_path, name, changes) if changes else RecordedHost(recorded(name))
    found = finding(host, check, PATHS[name])
    assert (found.name, found.answer) == (check, answer), found
    assert says in found.evidence
    assert found.remedy or answer != "no"


@pytest.mark.skipif(not (REPOSITORY / "csrc").exists(), reason="not a checkout")
def test_registered_memory_is_that_of_the_engine():
    tuned = dict(re.findall(r"(k\w+) = (\d+(?: << \d+)?)[,;]", (REPOSITORY / "csrc" / "tuning.h").read_text()))
    shift = tuned["kRegisteredBytes"].split(" << ")
    assert int(shift[0]) << int(shift[1]) == system._REGISTERED_BOUNCE_BYTES
    assert int(tuned["kMostUringWorkers"]) == system._WORKERS
    assert int(tuned["kMostUringWorkersOfGpu"]) == system._WORKERS_OF_GPU


def test_every_check_has_a_case_for_each_answer():
    assert set(CASES) == set(BY_NAME)
    lacking = {check: {"yes", "no", "unknown"} - {case[0] for case in cases} for check, cases in CASES.items()}
    assert not {check: answers for check, answers in lacking.items() if answers}


@pytest.mark.parametrize(
    ("name", "noes"),
    [
        ("nfs_rdma", set()),
        ("local_nvme", {"disk_link", "iommu", "acs", "locked_memory"}),
        ("container", {"gds", "udev", "peer_to_peer", "io_uring", "locked_memory", "security"}),
        (
            "laptop",
            {
                "gds",
                "file_system",
                "gpu",
                "driver",
                "cuda",
                "gpu_supported",
                "peer_to_peer",
                "cufile",
                "locked_memory",
                "security",
            },
        ),
    ],
)
def test_the_noes_of_a_recorded_host(name, noes):
    host = RecordedHost(recorded(name))
    found = diagnose(host, place_of(host, PATHS[name]))
    assert [one.name for one in found] == list(BY_NAME)
    assert {one.name for one in found if one.answer == "no"} == noes


@pytest.mark.parametrize(
    ("name", "working"),
    [
        ("nfs_rdma", {"any", "gpu", "direct", "io_uring", "gds"}),
        ("container", {"any", "gpu", "direct"}),
        ("laptop", {"any", "direct", "io_uring"}),
    ],
)
def test_features_that_work_on_a_recorded_host_are_found(name, working):
    host = RecordedHost(recorded(name))
    found = diagnose(host, place_of(host, PATHS[name]))
    assert {asked for asked in ("any", "gpu", "direct", "io_uring", "gds") if works(found, asked)} == working


def test_a_host_of_which_nothing_is_known_is_diagnosed_all_the_same(tmp_path):
    host = RecordedHost(tmp_path)
    found = diagnose(host, place_of(host, "/data"))
    assert [one.name for one in found] == list(BY_NAME)
    remedies = {one.name: one.remedy for one in found if one.answer != "unknown"}
    assert set(remedies) == {"driver", "peer_to_peer"}
    assert remedies["driver"].startswith("if the machine has an NVIDIA GPU, ")
    assert not works(found)


def test_a_library_for_forward_compatibility_is_newer_on_purpose(tmp_path):
    host = amended(tmp_path, "local_nvme", {"environ": "LD_LIBRARY_PATH=/usr/local/cuda/compat\n"})
    compat = tmp_path / "local_nvme/usr/local/cuda/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.580.65.06").write_text("")
    (compat / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")
    found = finding(host, "driver", PATHS["local_nvme"])
    assert found.answer == "yes" and "module 535.161.08, and libcuda 580.65.06" in found.evidence


def test_a_mount_behind_thousands_of_others_is_found(tmp_path):
    lines = "".join(f"{1000 + i} 29 0:{i} / /run/containers/{i:0200} rw - overlay overlay rw\n" for i in range(6000))
    host = amended(tmp_path, "local_nvme", {"proc/self/mountinfo": None})
    mountinfo = lines + (recorded("local_nvme") / "proc/self/mountinfo").read_text()
    (tmp_path / "local_nvme/proc/self/mountinfo").write_text(mountinfo)
    assert place_of(host, "/mnt/fast/x").mount.at == "/mnt/fast"


def test_a_named_cufile_configuration_that_is_missing_is_named(tmp_path):
    host = amended(tmp_path, "container", {"environ": "CUFILE_ENV_PATH_JSON=/gone.json\n"})
    assert "/gone.json (CUFILE_ENV_PATH_JSON" in finding(host, "peer_to_peer", PATHS["container"]).evidence


def test_ports_of_nfs_by_tcp_are_not_guessed(tmp_path):
    host = amended(tmp_path, "nfs_rdma", mounted("nfs_rdma", NFS.format(kind="nfs", vers="3", proto="tcp", port="")))
    assert "port=" not in finding(host, "file_system", PATHS["nfs_rdma"]).evidence


def test_bridges_of_a_domain_with_five_digits_are_found_by_lspci():
    assert _acs_by_lspci(LSPCI.format(bridge="10000:e0:06.0", control=ON)) == {"10000:e0:06.0": True}


def test_no_iommu_at_all_is_a_yes(tmp_path):
    host = amended(tmp_path, "local_nvme", {"sys/class/iommu": None})
    os.mkdir(tmp_path / "local_nvme/sys/class/iommu")
    assert finding(host, "iommu", PATHS["local_nvme"]).answer == "yes"


def test_evidence_that_cannot_be_understood_is_an_unknown_and_the_others_go_on(tmp_path):
    host = amended(tmp_path, "local_nvme", {f"{NVME_GPU}/resource": "garbage\n"})
    found = {one.name: one for one in diagnose(host, place_of(host, PATHS["local_nvme"]))}
    assert found["bar1"].answer == "unknown" and "could not be understood" in found["bar1"].evidence
    assert found["disk_link"].answer == "no"


def test_statistics_of_one_process_show_operations_that_went_through_the_host(tmp_path):
    host = RecordedHost(copied(tmp_path, "nfs_rdma"))
    host.pid = 4242
    found = finding(host, "fallback", PATHS["nfs_rdma"])
    assert (found.answer, found.evidence) == ("yes", "of 102400 operations of process 4242, 0 went through the host")
    recorded = tmp_path / "nfs_rdma/tools/gds_stats -p 4242 -l 3"
    recorded.write_text(recorded.read_text().replace("n=40960 posix=0", "n=40960 posix=40960", 1))
    found = finding(host, "fallback", PATHS["nfs_rdma"])
    assert found.answer == "no" and "40960 went through the host" in found.evidence
    recorded.unlink()
    assert finding(host, "fallback", PATHS["nfs_rdma"]).answer == "unknown"


def test_operations_are_counted_over_gpus_reads_and_writes():
    one = (
        "GPU {} Read: bw=1.5 util(%)=9 n=10 posix={} err=0 MiB=1 "
        "Write: bw=0 util(%)=0 n=5 posix=1 err=0 MiB=0 BufRegister: n=2 err=0"
    )
    assert cufile_operations(f"{one.format(0, 0)}\n{one.format(1, 4)}") == (30, 6)
    assert cufile_operations("cuFile STATS VERSION : 8\nGLOBAL STATS:\n") is None


# --- where a path lies ------------------------------------------------------------------------------------------------


def test_the_innermost_mount_counts_and_of_two_at_one_place_the_last(tmp_path):
    host = amended(
        tmp_path, "local_nvme", mounted("local_nvme", ELSEWHERE.format(at="/mnt/fast", kind="tmpfs", source="t"))
    )
    assert place_of(host, "/mnt/fast/x").mount.kind == "tmpfs"
    assert place_of(host, "/mnt/faster/x").mount.at == "/"


def test_spaces_in_mount_points_are_unescaped():
    host = RecordedHost(recorded("laptop"))
    assert "/home/ada/My Cloud" in [mount.at for mount in mounts(host)]
    assert place_of(host, "/home/ada/My Cloud/x").mount.kind == "fuse.rclone"


def test_disks_are_found_below_encryption():
    place = place_of(RecordedHost(recorded("laptop")), "/home/ada/x")
    assert (place.block, place.controllers) == ("dm-0", ("0000:01:00.0",))


def test_disks_are_found_below_a_raid(tmp_path):
    raid = "sys/devices/virtual/block/md0"
    host = amended(tmp_path, "local_nvme", {f"{raid}/dev": "9:0\n", f"{raid}/slaves/.keep": ""})
    base = tmp_path / "local_nvme"
    (base / raid / "slaves/.keep").unlink()
    (base / raid / "slaves/nvme1n1p1").symlink_to(base / NVME_DISK / "nvme/nvme1/nvme1n1/nvme1n1p1")
    (base / "sys/dev/block/9:0").symlink_to(base / raid)
    (base / "sys/class/block/md0").symlink_to(base / raid)
    with open(base / "proc/self/mountinfo", "a") as file:
        file.write("600 29 9:0 / /mnt/raid rw shared:9 - xfs /dev/md0 rw\n")
    place = place_of(host, "/mnt/raid/x")
    assert (place.block, place.controllers) == ("md0", ("0000:61:00.0",))


def test_disks_with_several_paths_are_found_by_their_controllers(tmp_path):
    head = "sys/devices/virtual/nvme-subsystem/nvme-subsys1"
    host = amended(tmp_path, "local_nvme", {f"{head}/nvme1n1/dev": "259:7\n", f"{head}/subsysnqn": "nqn.2014\n"})
    base = tmp_path / "local_nvme"
    for link, target in (
        ("sys/class/block/nvme1n2", f"{head}/nvme1n1"),
        ("sys/dev/block/259:7", "sys/class/block/nvme1n2"),
        ("sys/class/nvme/nvme1", f"{NVME_DISK}/nvme/nvme1"),
        (f"{head}/nvme1", f"{NVME_DISK}/nvme/nvme1"),
    ):
        (base / link).parent.mkdir(parents=True, exist_ok=True)
        (base / link).symlink_to(base / target)
    (base / "sys/class/block/nvme1n1").unlink()
    (base / "sys/class/block/nvme1n1").symlink_to(base / head / "nvme1n1")
    with open(base / "proc/self/mountinfo", "a") as file:
        file.write("600 29 259:7 / /mnt/shared rw shared:9 - xfs /dev/nvme1n1 rw\n")
    assert place_of(host, "/mnt/shared/x").controllers == ("0000:61:00.0",)


def test_a_network_card_of_the_other_socket_is_another_node():
    host = RecordedHost(recorded("nfs_rdma"))
    assert between(host, NVIDIA_GPUS[0], "0000:18:00.0") == "same switch"
    assert between(host, NVIDIA_GPUS[0], "0000:b8:00.0") == "other node"


def test_links_that_lead_out_of_the_evidence_lead_nowhere(tmp_path):
    (tmp_path / "evidence").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "evidence/out").symlink_to(tmp_path / "outside")
    assert RecordedHost(tmp_path / "evidence").real("/out") is None


@pytest.mark.parametrize("check", ["reading", "gds", "direct", "alignment", "calibration", "file_system"])
def test_a_path_that_does_not_answer_is_not_asked_again(check, tmp_path):
    host = RecordedHost(copied(tmp_path, "nfs_rdma"))
    host.probe = lambda *_: pytest.fail("the path was asked")
    found = finding(host, check, PATHS["nfs_rdma"], silence="no answer within 2 s")
    assert found.answer in ("no", "unknown")
    assert "no answer within 2 s" in found.evidence or check == "alignment"


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_record_of_a_host_says_what_the_host_said(tmp_path, name):
    """Links and all, of hosts that have what this one lacks."""
    source = RecordedHost(recorded(name))
    host = ThisHost(
        {probe: lambda path, probe=probe: source.probe(probe) for probe in PROBES}, LIMITS_S, recorded(name)
    )
    host.environment, host.tool = source.environment, source.tool
    place = place_of(host, PATHS[name])
    said = diagnose(host, place)
    host.record(tmp_path / "record")
    shutil.copytree(recorded(name) / "tools", tmp_path / "record/tools")
    again = RecordedHost(tmp_path / "record")
    assert place_of(again, PATHS[name]) == place
    assert diagnose(again, place) == said == diagnose(source, place)
