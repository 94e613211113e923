"""Checks of the network cards that a network file system uses."""

from __future__ import annotations

import re

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.gpu import MODULES
from gdsdata.doctor.place import Place
from gdsdata.io.file_systems import NETWORK_KINDS

_CLASS = "/sys/class/infiniband"
_CUFILE_KINDS = frozenset(MODULES)  # network file systems that move bytes to GPUs by RDMA


@check("RDMA devices up")
def rdma(host: Host, place: Place) -> Answer:
    """Check that at least one port works: many servers have ports without a cable.

    Its ``state`` is then "4: ACTIVE" (Documentation/ABI/stable/sysfs-class-infiniband).
    """
    kind = place.mount.kind if place.mount else ""
    ports = _ports(host)
    if not ports:
        if kind in NETWORK_KINDS and kind not in _CUFILE_KINDS:
            return unknown(f"there is no RDMA device; {kind} needs none")
        if kind in NETWORK_KINDS:
            return no(
                "there is no RDMA device", "install the card's driver (mlx5_ib; MLNX_OFED or DOCA), modprobe rdma_ucm"
            )
        return unknown("there is no RDMA device; a local disk needs none")
    said, up = [], False
    for device, port in ports:
        state, rate, layer = (
            host.text(f"{_CLASS}/{device}/ports/{port}/{name}") for name in ("state", "rate", "link_layer")
        )
        up = up or (state or "").endswith("ACTIVE")
        state_name = (state or "state unknown").split(": ")[-1]
        said.append(f"{device}/{port} {state_name}, {rate or 'rate unknown'}, {layer or 'link layer unknown'}")
    if not up:
        return no(
            "; ".join(said), "look at cable and switch: ibstat; ip link set DEVICE up; for InfiniBand a subnet manager"
        )
    return yes("; ".join(said))


@check("no loss (pause frames)")
def pause_frames(host: Host, place: Place) -> Answer:
    """Check that no packet was lost. InfiniBand has credits and loses none.

    RoCE needs a network without losses. Pause frames prevent them, for the link (``ethtool -a``) or
    for a priority (rx_prio3_pause and similar counters in ``ethtool -S``; mlx5 counters in
    Documentation/networking/device_drivers/ethernet/mellanox). A sequence out of order
    (hw_counters/out_of_sequence, packet_seq_err) is a loss that had to be sent again.
    """
    ethernet = [
        (device, port)
        for device, port in _ports(host)
        if _layer(host, device, port) == "Ethernet" and _up(host, device, port)
    ]
    if not ethernet:
        up = [(device, port) for device, port in _ports(host) if _up(host, device, port)]
        others = [device for device, port in up if _layer(host, device, port) != "InfiniBand"]
        if others:
            return unknown(f"{', '.join(others)}: neither Ethernet nor InfiniBand, so pause frames say nothing")
        return yes("InfiniBand, which has credits") if up else unknown("no RDMA device is up")
    lossy, quiet, said = [], [], []
    for device, port in ethernet:
        lost = sum(
            host.number(f"{_CLASS}/{device}/ports/{port}/hw_counters/{name}") or 0
            for name in ("out_of_sequence", "packet_seq_err")
        )
        pauses, allowed = _pauses(host, device)
        said.append(f"{device}: {'unknown' if pauses is None else pauses} pause frames, {lost} out of sequence")
        if lost:
            lossy.append(device)
        if not pauses and not allowed:
            quiet.append(device)
    if lossy:
        remedy = (
            "turn priority flow control on at card and switch: mlnx_qos -i DEVICE --pfc 0,0,0,1,0,0,0,0 --trust dscp"
        )
        return no("; ".join(said), remedy)
    if quiet:
        return unknown("; ".join(said), "look at ethtool -a and mlnx_qos -i: nothing was lost or paused so far")
    return yes("; ".join(said))


def _pauses(host: Host, device: str) -> tuple[int | None, bool]:
    """Return the pause frames so far (None: unknown), and whether the link may pause."""
    count, allowed = None, False
    for interface in host.names(f"{_CLASS}/{device}/device/net"):
        counters = host.tool("ethtool", "-S", interface)
        if counters is not None:
            found = re.findall(r"^\s*[rt]x_(?:prio\d_|global_)?pause(?:_ctrl_phy)?:\s*(\d+)", counters, re.MULTILINE)
            count = (count or 0) + sum(map(int, found))
        settings = host.tool("ethtool", "-a", interface) or ""
        allowed = allowed or bool(re.search(r"^(?:RX|TX):\s*on", settings, re.MULTILINE))
    return count, allowed


def _ports(host: Host) -> list[tuple[str, str]]:
    return [(nic, port) for nic in host.names(_CLASS) for port in host.names(f"{_CLASS}/{nic}/ports")]


def _layer(host: Host, device: str, port: str) -> str | None:
    return host.text(f"{_CLASS}/{device}/ports/{port}/link_layer")


def _up(host: Host, device: str, port: str) -> bool:
    return (host.text(f"{_CLASS}/{device}/ports/{port}/state") or "").endswith("ACTIVE")
