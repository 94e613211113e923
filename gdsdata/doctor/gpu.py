"""Checks of the GPU, its driver, and what cuFile needs of them."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.place import Place, gpus

OLDEST_CAPABILITY = (6, 0)
# By file system: the module that must be registered with nvidia-fs. The names are those in
# nvidia-fs's own table (nvfs-mod.c).
MODULES = {
    "nfs": "rpcrdma",
    "nfs4": "rpcrdma",
    "lustre": "lnet",
    "wekafs": "wekafsio",
    "gpfs": "mmfslinux",
    "beegfs": "beegfs",
}


@check("driver's module and library")
def driver(host: Host, place: Place) -> Answer:
    """Compare the versions of the driver's module and of its library.

    The library refuses a module of another version (nvidia-smi: "Driver/library version mismatch").
    A machine has two versions after an upgrade, until its next boot. NVIDIA's containers have a
    newer library on purpose, in a folder "compat" (CUDA Compatibility guide, "forward
    compatibility").
    """
    module = _driver_version(host)
    if module is None and host.exists("/dev/dxg"):  # WSL 2
        return unknown("Windows has the driver, and shares it by /dev/dxg", "see that nvidia-smi works")
    if module is None:
        remedy = "install NVIDIA's driver, or load it: modprobe nvidia"
        if gpus(host):
            return no(f"GPU {', '.join(gpus(host))}, but no /proc/driver/nvidia/version", remedy)
        return no("no /proc/driver/nvidia/version", f"if the machine has an NVIDIA GPU, {remedy}")
    library = version_of_library(host, "libcuda.so.1")
    if not library:
        return unknown(f"module {module}; libcuda.so.1 was not found", "in a container: run it with --gpus all")
    if library != module and "/compat/" in _library(host, "libcuda.so.1"):
        return yes(f"module {module}, and libcuda {library} of CUDA's package for forward compatibility")
    if library != module:
        remedy = "reboot, or load the module again; in a container, start it anew after the driver's upgrade"
        return no(f"module {module}, libcuda {library}", remedy)
    return yes(f"both are {module}")


@check("CUDA of torch and driver")
def cuda(host: Host, place: Place) -> Answer:
    """Compare the CUDA versions of torch and of the driver.

    A driver runs programs of its own CUDA major version and of older ones. Source: CUDA
    Compatibility guide, "minor version compatibility" (docs.nvidia.com/deploy/cuda-compatibility).
    """
    found = host.probe("cuda") or {}
    if "torch" not in found:
        return unknown(found.get("error", "torch could not be asked"))
    if not found["torch_cuda"]:
        remedy = "install a torch that is built with CUDA: pytorch.org/get-started"
        return no(f"torch {found['torch']} is built without CUDA", remedy)
    said = f"torch {found['torch']} with CUDA {found['torch_cuda']}"
    if not found["driver_cuda"]:
        return unknown(f"{said}; there is no libcuda.so.1, so the driver's version is unknown")
    major, minor = found["driver_cuda"] // 1000, found["driver_cuda"] % 1000 // 10
    said += f", driver with CUDA {major}.{minor}"
    if major < int(found["torch_cuda"].split(".")[0]):
        return no(said, f"upgrade the driver, or install a torch that is built for CUDA {major}")
    return yes(said)


@check("GPU supported by cuFile")
def gpu_supported(host: Host, place: Place) -> Answer:
    """Check the names and the compute capabilities of the GPUs.

    GPUDirect Storage needs data center or workstation cards (Tesla, Quadro, RTX) of compute
    capability 6 or more. On GeForce, cuFile works in compatibility mode. Source: GPUDirect Storage
    overview and release notes (docs.nvidia.com).
    """
    printed = host.tool("nvidia-smi", "--query-gpu=name,compute_cap,pci.bus_id", "--format=csv,noheader")
    rows = [[field.strip() for field in line.split(",")] for line in (printed or "").splitlines()]
    rows = [row for row in rows if len(row) == 3]
    if not rows:
        if not host.exists("/sys/bus/pci/devices"):
            return unknown("neither nvidia-smi nor /sys/bus/pci/devices lists GPUs", "see that nvidia-smi works")
        if not gpus(host) and _driver_version(host) is None:
            return no("no NVIDIA GPU on the PCI bus", "batches are made on the CPU; nothing is wrong with that")
        return unknown("nvidia-smi does not list the GPUs", "see that nvidia-smi works")
    said = "; ".join(f"{name} ({capability})" for name, capability, _ in rows)
    if all(_is_supported(name, capability) for name, capability, _ in rows):
        return yes(said)
    return no(said, 'use backend="auto": bytes go by way of pinned host memory, often as fast')


def _is_supported(name: str, capability: str) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", capability)) or OLDEST_CAPABILITY  # "[N/A]"
    return numbers >= OLDEST_CAPABILITY and not re.search(r"GeForce|TITAN|MX\d", name)


@check("nvidia-fs or P2PDMA")
def peer_to_peer(host: Host, place: Place) -> Answer:
    """Check for nvidia-fs or P2PDMA that serves the path: not only a loaded module.

    nvidia-fs: /proc/driver/nvidia-fs/modules lists the modules that have registered with it
    (nvfs-proc.c of NVIDIA/gds-nvidia-fs). If the module of a disk or network is not listed (a stock
    rpcrdma, for example), its bytes go through the host.

    P2PDMA needs (GPUDirect Storage installation guide, "PCI P2PDMA"):

    - ``properties.use_pci_p2pdma`` and ``block.nvme.use_pci_p2pdma`` in cufile.json, with ``block``
      beside ``properties`` and not in ``fs``
    - a kernel with CONFIG_PCI_P2PDMA
    - the open driver
    """
    where, config = cufile_configuration(host)
    if _is_set(host, config, "force_compat_mode", "CUFILE_FORCE_COMPAT_MODE"):
        return no(
            f"compatibility mode is forced ({where}, or CUFILE_FORCE_COMPAT_MODE)", "set force_compat_mode to false"
        )
    nvfs = re.search(r"version:\s*([\d.]+)", host.text("/proc/driver/nvidia-fs/version") or "")
    registered = [line.split(":")[0] for line in (host.text("/proc/driver/nvidia-fs/modules") or "").splitlines()]
    needed = _module_of(place)
    if nvfs and (not needed or needed in registered):
        return yes(f"nvidia-fs {nvfs[1]}, registered with it: {', '.join(registered) or 'not visible'}")
    is_disk = place.mount is None or place.mount.kind not in MODULES  # P2PDMA is for disks
    p2pdma = _p2pdma(host, where, config) if is_disk else None
    if p2pdma is not None and (p2pdma.answer != "no" or not nvfs):
        return p2pdma
    if nvfs:
        evidence = f"nvidia-fs {nvfs[1]} is loaded, but {needed} has not registered ({', '.join(registered) or 'none'})"
        return no(evidence, f"load a {needed} that is built for nvidia-fs (MLNX_OFED, DOCA or the vendor's client)")
    return no(
        f"nvidia-fs is not loaded, and {where} has no use_pci_p2pdma",
        "modprobe nvidia-fs (package nvidia-gds), or configure P2PDMA; until then bytes go by way of the host",
    )


def _is_set(host: Host, config: dict[str, Any], name: str, variable: str) -> bool:
    """Return whether a switch under "properties" is on.

    The environment's variable has priority (NVIDIA/gds-nvidia-fs issue 78).
    """
    said = host.environment(variable).lower()
    return said == "true" if said else _section(config, "properties").get(name) is True


def _section(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return an object in the settings by the names that lead to it; empty if there is none."""
    for name in names:
        inner = config.get(name)
        config = inner if isinstance(inner, dict) else {}
    return config


def _module_of(place: Place) -> str:
    if place.block.startswith("nvme"):
        return "nvme"
    return MODULES.get(place.mount.kind, "") if place.mount else ""


def _p2pdma(host: Host, where: str, config: dict[str, Any]) -> Answer | None:
    """Check P2PDMA's requirements; None if it is not switched on."""
    if not _is_set(host, config, "use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA"):
        return None
    if _section(config, "block", "nvme").get("use_pci_p2pdma") is not True:
        misplaced = "block" in _section(config, "fs")
        why = "block stands inside fs, where it is not read" if misplaced else "block.nvme.use_pci_p2pdma is not true"
        return no(f"{where}: {why}", 'write "block": {"nvme": {"use_pci_p2pdma": true}} beside "properties"')
    version = host.text("/proc/driver/nvidia/version") or ""
    if version and "Open Kernel Module" not in version:
        return no("P2PDMA is configured, and the driver is not the open one", "install the open kernel module (-open)")
    release = host.text("/proc/sys/kernel/osrelease") or ""
    kernel = host.text(f"/boot/config-{release}") or host.text(f"/lib/modules/{release}/config")
    if kernel is None:
        evidence = f"P2PDMA is configured in {where}; the configuration of kernel {release} cannot be read"
        return unknown(evidence, "see that it has CONFIG_PCI_P2PDMA=y")
    if "CONFIG_PCI_P2PDMA=y" not in kernel.splitlines():
        return no(f"kernel {release} has no CONFIG_PCI_P2PDMA", "boot a kernel that has it (Linux 6.2 or later)")
    return yes(f"P2PDMA is configured in {where}, and kernel {release} has it")


@check("cuFile found")
def cufile(host: Host, place: Place) -> Answer:
    """Look for libcufile where the engine does (csrc/backend/cufile_api.cpp).

    The version is that in the file's name, or the wheel's.
    """
    named = host.environment("GDSDATA_LIBCUFILE")
    if named and host.exists(named):
        return yes(f"GDSDATA_LIBCUFILE names {named}")
    if named:
        return no(f"GDSDATA_LIBCUFILE names {named}, which is not there", "name a libcufile.so.0, or unset it")
    path = _library(host, "libcufile.so.0")
    if path:
        version = version_of_library(host, "libcufile.so.0")
        return yes(f"{path}, version {version or 'not in its name'}")
    wheel = host.probe("wheels")
    if wheel and wheel.get("libcufile"):
        return yes(f"{wheel['libcufile']}, version {wheel.get('version') or 'not known'}")
    if wheel is None or "error" in wheel or host.tool("ldconfig", "-p") is None:
        return unknown("neither ldconfig nor Python's packages could be asked")
    return no("no libcufile.so.0 in ldconfig's list or Python's packages", "pip install nvidia-cufile, or nvidia-gds")


@check("BAR1 large enough")
def bar1(host: Host, place: Place) -> Answer:
    """Compare the size of BAR1 with 256 MiB, which a card has without a resizable BAR.

    Memory that is registered with cuFile lies in BAR1; if it does not fit, cuFile fails with error
    5016. BAR1 is the largest prefetchable range in sysfs. Each line of
    /sys/bus/pci/devices/*/resource has start, end and flags. Flag 0x2000 is IORESOURCE_PREFETCH
    (include/linux/ioport.h).
    """
    sizes = {address: size for address in gpus(host) if (size := _bar1_bytes(host, address))}
    if not sizes:
        return unknown("no GPU's resources are visible" if gpus(host) else "there is no GPU")
    said = ", ".join(f"{address}: {size // 2**20} MiB" for address, size in sizes.items())
    if min(sizes.values()) > 256 * 2**20:
        return yes(said)
    remedy = (
        "turn on Above 4G Decoding and Resizable BAR in the firmware (workstation cards: displaymodeselector), or "
        "keep max_device_pinned_mem_size_kb in cufile.json below it"
    )
    return no(said, remedy)


def _bar1_bytes(host: Host, address: str) -> int:
    sizes = [0]
    for line in (host.text(f"/sys/bus/pci/devices/{address}/resource") or "").splitlines()[:6]:
        start, end, flags = (int(number, 16) for number in line.split())
        if flags & 0x2000:
            sizes.append(end - start + 1)
    return max(sizes)


def cufile_configuration(host: Host) -> tuple[str, dict[str, Any]]:
    """Return the path of cuFile's settings, and the settings (JSON with comments)."""
    named = host.environment("CUFILE_ENV_PATH_JSON")
    for path in [named] if named else ["/etc/cufile.json", "/usr/local/cuda/gds/cufile.json"]:
        text = host.text(path)
        if text is not None:
            return _parsed(path, text)
    return (f"{named} (CUFILE_ENV_PATH_JSON names it, and it cannot be read)" if named else "cufile.json"), {}


def _parsed(path: str, text: str) -> tuple[str, dict[str, Any]]:
    bare = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda found: found[1] or "", text, flags=re.DOTALL)
    try:
        config = json.loads(re.sub(r",(\s*[}\]])", r"\1", bare))
    except ValueError as error:
        return f"{path} (not valid JSON: {error})", {}
    return path, config if isinstance(config, dict) else {}


def version_of_library(host: Host, name: str) -> str:
    """Return the version in a library's file name, behind .so.; empty without one."""
    path = _library(host, name)
    found = re.search(r"\.so\.(\d+\.[\d.]+)$", os.path.basename(host.real(path) or "")) if path else None
    return found[1] if found else ""


def _library(host: Host, name: str) -> str:
    """Return a library's path in the loader's order; empty if it has none.

    The folder in which CUDA installs cuFile is searched too.
    """
    folders = [folder for folder in host.environment("LD_LIBRARY_PATH").split(":") if folder.startswith("/")]
    listed = []
    for line in (host.tool("ldconfig", "-p") or "").splitlines():
        found, arrow, path = line.partition("=>")
        if arrow and found.split()[:1] == [name] and ("x86-64" in found or "AArch64" in found or "(libc6)" in found):
            listed.append(path.strip())
    candidates = [*(f"{folder}/{name}" for folder in folders), *listed, f"/usr/local/cuda/lib64/{name}"]
    return next((path for path in candidates if host.exists(path)), "")


def _driver_version(host: Host) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", host.text("/proc/driver/nvidia/version") or "")
    return found[1] if found else None
