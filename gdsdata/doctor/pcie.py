"""Checks of the path between disk or network card and GPU."""

from __future__ import annotations

import re

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.place import Place, gpus, pci_chain, rdma_devices

_DEVICES = "/sys/bus/pci/devices"
_NEAR_TO_FAR = ("same switch", "same root", "same node", "other node", "distance unknown")


@check("IOMMU off or passthrough")
def iommu(host: Host, place: Place) -> Answer:
    """Check that no IOMMU translates the GPUs' addresses.

    Through a translating IOMMU, peer-to-peer may fail or be slow. Source: GPUDirect Storage
    troubleshooting guide (iommu=off is best, iommu=pt works on some platforms).

    The type of a GPU's group shows its mode: "identity" is passthrough, "DMA" and "DMA-FQ"
    translate (Documentation/ABI/testing/sysfs-kernel-iommu_groups).
    """
    if not host.exists("/sys/class/iommu"):
        return unknown("/sys/class/iommu is not visible")
    if not host.names("/sys/class/iommu"):
        return yes("no IOMMU is in use")
    if not gpus(host):
        return unknown("there is no GPU")
    types = {}
    for address in gpus(host):
        group = host.real(f"{_DEVICES}/{address}/iommu_group")
        kind = host.text(f"{group}/type") if group else None
        if kind:
            types[address] = kind
    arguments = [word for word in (host.text("/proc/cmdline") or "").split() if "iommu" in word]
    said = f"{', '.join(host.names('/sys/class/iommu')[:2])}; kernel arguments: {' '.join(arguments) or 'none'}"
    if not types:
        passes = bool({"iommu=pt", "iommu.passthrough=1"} & set(arguments))
        return yes(said) if passes else unknown(f"{said}; groups' types are not visible")
    said += f"; {', '.join(sorted(set(types.values())))}"
    if set(types.values()) == {"identity"}:
        return yes(said)
    return no(said, "boot with iommu=off (amd_iommu=off, intel_iommu=off), or with iommu=pt, or turn VT-d/AMD-Vi off")


@check("PCIe ACS off")
def acs(host: Host, place: Place) -> Answer:
    """Check that ACS is off on each bridge above a GPU or above what serves the path.

    A bridge with ACS sends transfers between peers up to the root complex (GPUDirect Storage
    troubleshooting guide, "ACS"). Every user may read /proc/driver/nvidia-fs/bridges. It lists the
    bridges with any part of ACS on (nvfs_pcie_acs_enabled of NVIDIA/gds-nvidia-fs). ``lspci -vv``
    shows ACSCtl to root only.
    """
    if not gpus(host):
        return unknown("there is no GPU")
    above = {
        bridge for end in [*gpus(host), *place.controllers] for bridge in pci_chain(host, f"{_DEVICES}/{end}")[:-1]
    }
    if not above:
        return yes("no bridge is above GPUs and storage")
    listed = host.text("/proc/driver/nvidia-fs/bridges")
    if listed is not None:
        active, source = set(listed.split()) & above, "/proc/driver/nvidia-fs/bridges"
    else:
        printed = host.tool("lspci", "-D", "-vv")
        if printed is None:
            remedy = "install pciutils, and run the doctor as root"
            return unknown("no nvidia-fs, and lspci is missing or does not answer", remedy)
        known = _acs_by_lspci(printed)
        source = "lspci -vv"
        if above - set(known):
            remedy = "run the doctor as root, or: sudo lspci -vv | grep ACSCtl"
            return unknown("no nvidia-fs, and lspci shows bridges' settings to root alone", remedy)
        active = {bridge for bridge in above if known[bridge]}
    if not active:
        return yes(f"{len(above)} bridges above GPUs and storage, on none of them ({source})")
    remedy = f"turn it off in the firmware, or: setpci -s {min(active)} ECAP_ACS+6.w=0000 (each, after each boot)"
    return no(f"on at {', '.join(sorted(active))} ({source})", remedy)


def _acs_by_lspci(printed: str) -> dict[str, bool]:
    """Return by address whether a device has any part of ACS on.

    Devices whose capabilities are not shown are left out.
    """
    found = {}
    for section in re.split(r"\n\s*\n", printed):
        address = re.match(r"\s*([0-9a-f]{4,8}:\S+)", section)
        if address and "<access denied>" not in section and "Capabilities:" in section:
            control = re.search(r"ACSCtl:(.*)", section)
            found[address[1]] = bool(control and "+" in control[1])
    return found


@check("disk's link at full speed")
def disk_link(host: Host, place: Place) -> Answer:
    """Compare each NVMe disk's link with the fastest link of that disk.

    The remedy is another slot, also if the present slot cannot do more. sysfs has current_link_*
    and max_link_* of each PCI device (Documentation/ABI/testing/sysfs-bus-pci), and the model of an
    NVMe controller.
    """
    disks = [address for address in place.controllers if host.names(f"{_DEVICES}/{address}/nvme")]
    if not disks:
        return unknown("no NVMe disk of this machine is below the path")
    said, slow = [], False
    for address in disks:
        name = host.names(f"{_DEVICES}/{address}/nvme")[0]
        model = host.text(f"{_DEVICES}/{address}/nvme/{name}/model") or "model unknown"
        now, most = (_link(host, address, which) for which in ("current", "max"))
        if now is None or most is None:
            return unknown(f"{name} ({model}): the link is not visible")
        slow = slow or now[0] < most[0] or now[1] < most[1]
        said.append(f"{name} ({model}): {now[0]:g} GT/s x{now[1]} of {most[0]:g} GT/s x{most[1]}")
    if slow:
        return no("; ".join(said), "seat it anew, or in a slot with more lanes; look for bifurcation in the firmware")
    return yes("; ".join(said))


def _link(host: Host, address: str, which: str) -> tuple[float, int] | None:
    """Return GT/s and lanes; None without a link.

    sysfs prints "16.0 GT/s PCIe" and "4"; without a link it prints "Unknown" and "0".
    """
    speed = re.match(r"[\d.]+", host.text(f"{_DEVICES}/{address}/{which}_link_speed") or "")
    width = host.number(f"{_DEVICES}/{address}/{which}_link_width")
    return (float(speed[0]), width) if speed and width else None


@check("storage near a GPU")
def distance(host: Host, place: Place) -> Answer:
    """Check that what serves the path is on the NUMA node of a GPU, or nearer.

    Two devices that share a bridge in sysfs are on one switch (or its root port). If they share
    only the host bridge, they are on one root. Otherwise their NUMA nodes are compared. In
    ``nvidia-smi topo -m`` these are PIX/PXB, PHB, NODE and SYS.

    Between nodes peers are slow, and cuFile goes through the host by default
    (rdma_peer_affinity_policy and rdma_dynamic_routing of cufile.json).
    """
    if not gpus(host):
        return unknown("there is no GPU")
    if not place.controllers:
        return unknown("no visible PCI device serves the path")
    said, nearest = [], []
    for gpu in gpus(host):
        ways = [(_NEAR_TO_FAR.index(between(host, gpu, end)), end) for end in place.controllers]
        far, end = min(ways)
        nearest.append(far)
        said.append(f"GPU {gpu} and {_label(host, end)}: {_NEAR_TO_FAR[far]}")
    best = _NEAR_TO_FAR[min(nearest)]
    if best == "distance unknown":
        return unknown("; ".join(said))
    if best == "other node":
        return no("; ".join(said), "move the disk or card to a slot of the GPU's socket, or use another GPU")
    return yes("; ".join(said))


def between(host: Host, one: str, other: str) -> str:
    """Return how far two PCI devices are from each other: an item of `_NEAR_TO_FAR`."""
    paths = [host.real(f"{_DEVICES}/{address}") or "" for address in (one, other)]
    roots = [re.search(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})/", path) for path in paths]
    bridges = [set(pci_chain(host, f"{_DEVICES}/{address}")[:-1]) for address in (one, other)]
    if bridges[0] & bridges[1]:
        return "same switch"
    if roots[0] and roots[1] and roots[0][1] == roots[1][1]:
        return "same root"
    nodes = [host.number(f"{_DEVICES}/{address}/numa_node") for address in (one, other)]
    if None in nodes or -1 in nodes:
        return "distance unknown"
    return "same node" if nodes[0] == nodes[1] else "other node"


def _label(host: Host, address: str) -> str:
    for nic, its_address in rdma_devices(host).items():
        if its_address == address:
            return nic
    return next(iter(host.names(f"{_DEVICES}/{address}/nvme")), address)


@check("process near them (NUMA)")
def numa(host: Host, place: Place) -> Answer:
    """Check that this process may run on the nodes of its GPUs and disks.

    Pinned memory on another node than the GPU's costs about a third. A node's cores are in its
    ``cpulist``. The process's cores are in Cpus_allowed_list, which taskset, numactl and cpusets
    narrow (proc_pid_status(5)).
    """
    nodes = {end: host.number(f"{_DEVICES}/{end}/numa_node") for end in [*gpus(host), *place.controllers]}
    known = {end: node for end, node in nodes.items() if node is not None and node >= 0}
    if not known:
        return unknown("no device says its NUMA node" if nodes else "there is neither GPU nor disk to be near to")
    allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", host.text("/proc/self/status") or "")
    cores = _numbers(allowed[1]) if allowed else set()
    apart = {}
    for end, node in known.items():
        here = _numbers(host.text(f"/sys/devices/system/node/node{node}/cpulist") or "")
        if not here or not cores:
            return unknown(f"{end} is on node {node}, whose cores are not visible")
        if not here & cores:
            apart[end] = node
    said = ", ".join(f"{end}: node {node}" for end, node in sorted(known.items()))
    if apart:
        node = next(iter(apart.values()))
        remedy = (
            f"numactl --cpunodebind={node} --membind={node}; in a container or a job, ask for cores of that node first "
            "(docker run --cpuset-cpus), because numactl goes beyond no cpuset"
        )
        return no(f"{said}; no core of node {node} is allowed", remedy)
    return yes(f"{said}; cores {allowed[1] if allowed else ''}")


def _numbers(listed: str) -> set[int]:
    """Return the numbers in a list: 0, 1, 2, 3 and 8 for "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
