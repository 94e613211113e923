"""Checks of what the system allows this process to do."""

from __future__ import annotations

import re

from gdsdata.doctor.evidence import Host
from gdsdata.doctor.finding import Answer, check, no, unknown, yes
from gdsdata.doctor.place import Place, gpus
from gdsdata.io.budget import control_groups

_WORKERS, _WORKERS_OF_GPU = 8, 12  # the most that an engine has by default
_MOST_BOUNCE_BYTES = _WORKERS_OF_GPU * 16 << 20
# A worker registers with io_uring a part of its bounce memory (kRegisteredBytes in
# csrc/tuning.h), and its staging memory, which has 11.3 MiB by default.
_REGISTERED_BOUNCE_BYTES, _MOST_STAGING_BYTES = 4 << 20, 12 << 20
_CAP_IPC_LOCK = 14
_SECCOMP_FILTER = "2"
_ALL_USERS = "0 0 4294967295"  # /proc/self/uid_map outside of user namespaces: user_namespaces(7)
# The vector instructions that most of the engine's fast ways need, by the kind of processor, with
# the names that /proc/cpuinfo has for them. AVX-512 is faster still.
_VECTORS = {
    "x86_64": {"avx2": "avx2", "pclmul": "pclmulqdq", "crc32c": "sse4_2"},
    "aarch64": {"crc32c": "crc32"},
}


@check("io_uring")
def io_uring(host: Host, place: Place) -> Answer:
    """Try io_uring with the engine. If that is not possible, look for what forbids it.

    This may be kernel.io_uring_disabled (1: all but a group and CAP_SYS_ADMIN, 2: all;
    admin-guide/sysctl/kernel), or a seccomp filter such as Docker's.
    """
    remedy = "permit io_uring's calls (containers: seccomp; kernel.io_uring_disabled), on a kernel of 5.6 or newer"
    disabled = host.text("/proc/sys/kernel/io_uring_disabled")
    filtered = status_field(host, "Seccomp") == _SECCOMP_FILTER
    found = host.probe("io_uring")
    if found and "backend" in found:
        if not found["fallback_reason"]:
            return yes(f"the engine runs on it, {found['workers']} workers")
        hints = [f"kernel.io_uring_disabled={disabled}"] if disabled not in (None, "0") else []
        hints += ["this process has a seccomp filter"] if filtered else []
        return no("; ".join([found["fallback_reason"], *hints]), remedy)
    if disabled in ("1", "2"):
        return no(f"kernel.io_uring_disabled={disabled}", "sysctl kernel.io_uring_disabled=0, or run as its group")
    said = (found or {}).get("error", "it was not tried")
    return unknown(f"{said}; {'a seccomp filter may forbid it' if filtered else 'nothing forbids it'}")


@check("vector instructions")
def vector_instructions(host: Host, place: Place) -> Answer:
    """Ask the engine which ones it uses. If it lacks some, look whether the processor has them.

    Without them, checksums take five times as long, and shuffled orders six times. A virtual
    machine may hide them.
    """
    found = host.probe("processor") or {}
    if "uses" not in found:
        return unknown(found.get("error", "the engine was not asked"))
    needed = _VECTORS.get(found["machine"])
    if needed is None:
        return unknown(f"the engine has none for {found['machine']}")
    lacking = [name for name in needed if name not in found["uses"]]
    if not lacking:
        return yes(f"the engine uses {', '.join(found['uses'])}")
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", host.text("/proc/cpuinfo") or "", re.MULTILINE)
    there = [needed[name] for name in lacking if flags and needed[name] in flags[1].split()]
    said = f"the engine lacks {', '.join(lacking)}"
    if there:
        return no(f"{said}; /proc/cpuinfo has {', '.join(there)}", "report this fault of gdsdata")
    return no(said, "let a virtual machine have its host's processor (QEMU: -cpu host), or use a newer one")


@check("locked memory")
def locked_memory(host: Host, place: Place) -> Answer:
    """Compare the limits on locked memory with what the engine may register.

    Memory that is registered with io_uring counts against RLIMIT_MEMLOCK (io_uring_register(2)), as
    do RDMA's buffers. A process with CAP_IPC_LOCK has no such limit, but may have a control
    group's. If the limit is lower, the engine works with memory that is not registered.
    """
    most_registered_bytes = _most_registered_bytes(host)
    limit = re.search(r"Max locked memory\s+(\S+)", host.text("/proc/self/limits") or "")
    if not limit:
        return unknown("/proc/self/limits does not say")
    said = f"limit {limit[1]} bytes"
    group = _group_limit_bytes(host)
    if group is not None:
        said += f"; control group {group / 1e9:.1f} GB"
        if group < 2 * _MOST_BOUNCE_BYTES:
            most = f"the engine's own may be {_MOST_BOUNCE_BYTES / 1e9:.2f} GB"
            return no(said, f"give the container more memory: {most}")
    if limit[1] == "unlimited" or int(limit[1]) >= most_registered_bytes:
        return yes(said)
    if _ignores_lock_limit(host):
        return yes(f"{said}, which CAP_IPC_LOCK overrides")
    most = f"{most_registered_bytes} bytes at most are registered"
    return no(said, f"ulimit -l unlimited (docker run --ulimit memlock=-1); {most}")


def _most_registered_bytes(host: Host) -> int:
    """Return how much an engine with the default options registers, with a GPU if there is one."""
    if gpus(host):
        return _WORKERS_OF_GPU * (_REGISTERED_BOUNCE_BYTES + _MOST_STAGING_BYTES)
    return _WORKERS * _REGISTERED_BOUNCE_BYTES


def _group_limit_bytes(host: Host) -> int | None:
    """Return the least limit of the control groups; in version 1, about 2**63 means none."""
    groups = control_groups("memory", host.text("/proc/self/mountinfo") or "", host.text("/proc/self/cgroup") or "")
    names = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}
    files = [f"{folder}/{names[kind]}" for kind, folder in groups]
    # Those of a container that has no file of memberships.
    files += ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    limits = [limit for limit in map(host.number, files) if limit is not None and limit < 2**60]
    return min(limits, default=None)


def _ignores_lock_limit(host: Host) -> bool:
    """Return whether CAP_IPC_LOCK lifts the limit.

    It does so in the first user namespace alone.
    """
    has_it = int(status_field(host, "CapEff") or "0", 16) >> _CAP_IPC_LOCK & 1
    users = (host.text("/proc/self/uid_map") or _ALL_USERS).split()
    return bool(has_it) and users == _ALL_USERS.split()


@check("no security module")
def security(host: Host, place: Place) -> Answer:
    """Look for security modules that may refuse a call or nvidia-fs.

    - SELinux: /sys/fs/selinux/enforce
    - AppArmor: /proc/self/attr/current, "PROFILE (enforce)"
    - seccomp: proc_pid_status(5), 2 is a filter
    - kernel_lockdown(7): from [integrity] on, only signed modules are loaded
    """
    status = status_field(host, "Seccomp")
    attributes = [host.text(f"/proc/self/attr/{name}") for name in ("apparmor/current", "current")]
    profile, context = attributes[0] or attributes[1] or "", attributes[1] or ""  # the first where modules are stacked
    lockdown = re.search(r"\[(\w+)\]", host.text("/sys/kernel/security/lockdown") or "")
    found = []
    if host.text("/sys/fs/selinux/enforce") == "1" and "unconfined" not in context:
        found.append((f"SELinux enforces {context}", "look for denials: ausearch -m avc"))
    if profile.endswith("(enforce)") and not profile.startswith("unconfined"):
        found.append((f"AppArmor enforces {profile}", "docker run --security-opt apparmor=unconfined"))
    if status == _SECCOMP_FILTER:
        found.append(("a seccomp filter", "docker run --security-opt seccomp=PROFILE.json with io_uring's calls"))
    if lockdown and lockdown[1] != "none":
        found.append((f"kernel lockdown: {lockdown[1]}", "sign nvidia-fs (mokutil), or turn Secure Boot off"))
    if found:
        return no("; ".join(what for what, _ in found), "if something is refused: " + "; ".join(do for _, do in found))
    if not status:
        return unknown("/proc/self/status does not say")
    return yes("no seccomp filter, no enforcing SELinux or AppArmor profile, no lockdown")


def status_field(host: Host, name: str) -> str:
    """Return a field of /proc/self/status; empty if it is missing."""
    found = re.search(rf"^{name}:\s*(\S+)", host.text("/proc/self/status") or "", re.MULTILINE)
    return found[1] if found else ""
