"""Limits of memory and cores follow the machine and its groups, hold, and change no order."""

import contextlib
import os
import subprocess
import sys
import textwrap
import uuid
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import MIB, arrays, grouped, random_bytes, require_direct

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Lanes, RowGroups
from gdsdata.data.batches import pieces, row_groups
from gdsdata.formats import Records
from gdsdata.io import budget
from gdsdata.io.options import staging_for

pytestmark = pytest.mark.usefixtures("quick_programs")

GIB = 2**30
WITHOUT_LIMIT_V1 = 9223372036854771712


# ------------------------------------------------------------------------------------- what the machine and groups say


def machine(root: Path, available_bytes: int, cgroup: str = "", mountinfo: str = "") -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_bytes // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    return str(root)


def group_v2(folder: Path, most: object, high: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\nactive_file {cached}\ninactive_file 0\n")


def group_v1(folder: Path, most: int, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 5\ntotal_active_file 0\ntotal_inactive_file {cached}\n")


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
V1_MOUNT = "30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"


def test_without_control_groups_it_is_what_the_machine_has(tmp_path):
    assert budget.available_bytes(machine(tmp_path, 3 * GIB)) == 3 * GIB


@pytest.mark.parametrize(("own", "above", "left"), [(2, 8, 2), (8, 2, 2), ("max", 1, 1), ("max", "max", 3)])
def test_the_tightest_group_above_this_process_counts(tmp_path, own, above, left):
    root = machine(tmp_path, 3 * GIB, "0::/pod/task\n", V2_MOUNT)
    for inside, limit in (("pod/task", own), ("pod", above)):
        group_v2(tmp_path / "sys/fs/cgroup" / inside, limit if limit == "max" else limit * GIB, "max", 0, 0)
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 1\n")  # the outermost group has no limit
    assert budget.available_bytes(root) == left * GIB


def test_a_mount_point_whose_name_is_not_utf_8_hides_no_group(tmp_path):
    root = machine(tmp_path, 3 * GIB, "0::/pod\n", V2_MOUNT)
    group_v2(tmp_path / "sys/fs/cgroup/pod", GIB, "max", 0, 0)
    mountinfo = tmp_path / "proc/self/mountinfo"
    mountinfo.write_bytes(b"50 1 0:60 / /mnt/\xff rw - ext4 /dev/sdb1 rw\n" + mountinfo.read_bytes())
    assert budget.available_bytes(root) == GIB


def test_memory_that_a_group_has_taken_counts_without_its_page_cache(tmp_path):
    root = machine(tmp_path, 9 * GIB, "0::/pod\n", V2_MOUNT)
    group_v2(tmp_path / "sys/fs/cgroup/pod", 4 * GIB, 3 * GIB, 2 * GIB, GIB)
    assert budget.available_bytes(root) == 2 * GIB
    group_v2(tmp_path / "sys/fs/cgroup/pod", 4 * GIB, "max", 5 * GIB, 0)
    assert budget.available_bytes(root) == 0


def test_groups_of_version_1_are_asked_too(tmp_path):
    root = machine(tmp_path, 9 * GIB, "5:cpu:/x\n4:memory:/docker/a\n0::/\n", V1_MOUNT + V2_MOUNT)
    group_v1(tmp_path / "sys/fs/cgroup/memory", WITHOUT_LIMIT_V1, 8 * GIB, 0)
    group_v1(tmp_path / "sys/fs/cgroup/memory/docker", 4 * GIB, 2 * GIB, GIB)
    group_v1(tmp_path / "sys/fs/cgroup/memory/docker/a", WITHOUT_LIMIT_V1, GIB, 0)
    assert budget.available_bytes(root) == 3 * GIB


@pytest.mark.parametrize("top", ["/docker/a", "/elsewhere"])
def test_a_container_that_sees_its_group_as_the_top_is_limited_by_it(tmp_path, top):
    mount = f"30 23 0:26 {top} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    root = machine(tmp_path, 9 * GIB, "4:memory:/docker/a\n", mount)
    group_v1(tmp_path / "sys/fs/cgroup/memory", GIB, 0, 0)
    assert budget.available_bytes(root) == GIB


def test_processes_on_one_machine_share(monkeypatch):
    monkeypatch.setattr(budget, "available_bytes", lambda: 8 * GIB)
    assert budget.share_bytes() == 4 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget.share_bytes() == GIB


@pytest.fixture
def cores(monkeypatch):
    """A machine of 16 cores; the test may call it with the number of this process's own."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)

    def own(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))

    own(16)
    return own


V1_CPU_MOUNT = "30 23 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("own", "above", "left"),
    [("max 100000", "max 100000", 16), ("400000 100000", "max 100000", 4), ("800000 100000", "350000 100000", 3)],
)
def test_the_smallest_quota_above_this_process_limits_its_cores(tmp_path, cores, own, above, left):
    root = machine(tmp_path, GIB, "0::/pod/task\n", V2_MOUNT)
    for inside, quota in (("pod/task", own), ("pod", above)):
        (tmp_path / "sys/fs/cgroup" / inside).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / inside / "cpu.max").write_text(f"{quota}\n")
    assert budget.usable_cores(root) == left


@pytest.mark.parametrize(("quota_us", "left"), [(-1, 16), (250_000, 2), (50_000, 1)])
def test_quotas_of_version_1_limit_cores_too(tmp_path, cores, quota_us, left):
    root = machine(tmp_path, GIB, "5:cpu,cpuacct:/x\n4:memory:/y\n", V1_MOUNT + V1_CPU_MOUNT)
    group = tmp_path / "sys/fs/cgroup/cpu/x"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert budget.usable_cores(root) == left


def test_cores_that_are_not_this_processs_are_not_used(tmp_path, cores):
    cores(3)
    assert budget.usable_cores(machine(tmp_path, GIB)) == 3


@pytest.mark.parametrize(
    ("own", "processes", "least", "share"),
    [(16, 1, 1, 16), (16, 4, 1, 4), (16, 8, 4, 4), (16, 32, 1, 1), (2, 32, 4, 2), (4, 4, 1, 4), (8, 4, 1, 4)],
)
def test_processes_on_one_machine_share_its_cores(tmp_path, monkeypatch, cores, own, processes, least, share):
    cores(own)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert budget.share_of_cores(least, machine(tmp_path, GIB)) == share


def test_workers_of_a_loader_share_cores_as_well(monkeypatch, cores):
    monkeypatch.setattr(budget, "get_worker_info", lambda: SimpleNamespace(num_workers=4))
    assert budget.share_of_cores() <= 4


@pytest.mark.parametrize(
    ("processes", "options", "staging_mib", "segment_mib"),
    [
        (1, {}, 10, None),
        (2, {}, 8, 2),
        (8, {"segment_bytes": MIB}, 10, None),  # as the program says
        (1, {"segment_bytes": 8 * MIB}, 24, None),
        (1, {"request_bytes": 8 * MIB}, 24, None),
        (2, {"request_bytes": 8 * MIB}, 24, 2),
    ],
)
def test_staging_of_several_processes_is_smaller(processes, options, staging_mib, segment_mib):
    found = staging_for(EngineOptions(**options), processes)
    assert found == {"staging_bytes": staging_mib * MIB} | ({"segment_bytes": segment_mib * MIB} if segment_mib else {})


# ------------------------------------------------------------------------------------------------------ lanes' pieces


RECORD_BYTES = 4096
SHAPE = Lanes(2, 8, 8)  # windows of 512 KiB


@pytest.fixture
def records(tmp_path) -> Path:
    """Write two whole windows and a last one of nearly two."""
    (tmp_path / "a.bin").write_bytes(random_bytes((3 * 128 + 112) * RECORD_BYTES))
    require_direct(tmp_path / "a.bin")
    return tmp_path / "a.bin"


def in_lanes(path: Path, **arguments) -> GDSDataset:
    records = Records("uint8", (RECORD_BYTES,))
    return GDSDataset(path, 16, records, shuffle=SHAPE, device="cpu", **grouped({"prefetch": 2, **arguments}))


def test_two_windows_are_held_and_no_more_though_the_last_is_longer(records, monkeypatch):
    monkeypatch.setattr(pieces, "_SLACK", 0)
    monkeypatch.setattr(pieces, "_SLACK_BYTES", 16 * 4096)  # pieces can begin anywhere in the files
    dataset = in_lanes(records, options=EngineOptions(direct="always"))
    batches = arrays(dataset)
    stats = dataset.stats()
    assert sorted(row.tobytes() for batch in batches for row in batch) == sorted(
        records.read_bytes()[i : i + RECORD_BYTES] for i in range(0, records.stat().st_size, RECORD_BYTES)
    )
    assert 2**20 * 0.9 < stats["piece_memory_bytes"] <= 2 * (2**19 + 16 * 4096)
    # Every piece was read as one: none of its samples by itself.
    assert sum(stats["piece_bytes"].values()) >= records.stat().st_size - 16 * RECORD_BYTES


@pytest.mark.parametrize("budget_bytes", [0, 4096, 300_000])
def test_less_memory_changes_no_order(records, monkeypatch, budget_bytes):
    expected = arrays(in_lanes(records, seed=3))
    monkeypatch.setattr(pieces, "share_bytes", lambda: budget_bytes)
    dataset = in_lanes(records, seed=3)
    with pytest.warns(RuntimeWarning, match=r"samples of the others are read one by one\. Give it more memory"):
        gdsdata.io.engine._warned.clear()
        got = arrays(dataset)
    assert all(np.array_equal(one, other) for one, other in zip(got, expected, strict=True))
    assert dataset.stats()["piece_memory_bytes"] <= budget_bytes


# --------------------------------------------------------------------------------------------------------- row groups


@pytest.fixture
def table(tmp_path) -> Path:
    """Write 40 row groups of 100 numbers, 800 bytes each."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"id": range(4000), "text": [str(i) for i in range(4000)]}), tmp_path / "a.parquet", row_group_size=100
    )
    return tmp_path / "a.parquet"


def test_fewer_row_groups_in_memory_change_no_order(table, monkeypatch):
    def ids(dataset):
        found = []
        for batch in dataset:
            found.append((batch["id"].tolist(), [bytes(text.tolist()) for text in batch["text"].as_list()]))
            if (reader := dataset._iteration.running) is not None:  # with the last batch, reading is closed
                chunks = reader.row_groups
                assert chunks.held_bytes <= chunks.budget_bytes
                assert chunks.held_bytes == sum(map(chunks.size_bytes, chunks.held))
        return found

    def dataset():
        return GDSDataset(table, 32, shuffle=RowGroups(4, 300), device="cpu", seed=5)

    expected = ids(dataset())
    for share_bytes in (0, 30_000):
        monkeypatch.setattr(row_groups, "share_bytes", lambda share_bytes=share_bytes: share_bytes)
        limited = dataset()
        gdsdata.io.engine._warned.clear()
        with pytest.warns(RuntimeWarning, match="decoded again for each batch. Give it more memory"):
            assert ids(limited) == expected
        ring_bytes = limited.prefetch * limited._samples.index.most_bytes(32)
        decoding_bytes = row_groups._decoding_bytes(limited._samples.index)
        assert limited.stats()["ring_bytes"] <= ring_bytes + max(share_bytes, decoding_bytes)


def test_passed_row_groups_are_released_without_a_call_of_stats(table, monkeypatch):
    class Values(list):
        """A list that can have weak references."""

    decoded = []
    plain = type(GDSDataset(table, 32, device="cpu")._samples.source.index).decode

    def watched(self, group, stored):
        values = Values(plain(self, group, stored))
        decoded.append(weakref.ref(values))
        return values

    monkeypatch.setattr(row_groups, "_KEPT_BYTES", 0)
    dataset = GDSDataset(table, 32, shuffle=False, device="cpu")
    monkeypatch.setattr(type(dataset._samples.source.index), "decode", watched)
    most = 0
    for _ in dataset:
        most = max(most, sum(one() is not None for one in decoded))
    assert len(decoded) >= 40 and most <= 12


# ------------------------------------------------------------------------------------------------------------- engine


def test_an_engine_takes_little_bounce_memory_where_little_is_left(monkeypatch):
    monkeypatch.setattr(gdsdata.io.engine, "share_bytes", lambda: 100 * MIB)
    options = EngineOptions(workers=2, coalesce_gap_bytes=4097)  # its own engine
    shared = gdsdata.io.engine.shared_engine(options, torch.device("cpu"))
    assert shared.bounce_bytes == 2 * 4 * MIB


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (4, 3), (16, 8)])
def test_an_engine_leaves_a_core_of_its_share_to_the_consumer(monkeypatch, cores, workers):
    monkeypatch.setattr(gdsdata.io.engine, "share_of_cores", lambda least: cores)
    options = EngineOptions(backend="uring", coalesce_gap_bytes=5000 + cores)  # its own engine
    assert gdsdata.io.engine.shared_engine(options, torch.device("cpu")).workers == workers


# ------------------------------------------------------------------------------- in a control group with a limit


def limited_group(limit_bytes: int) -> Path:
    """Make a memory group below this process's own, or skip the test."""
    try:
        texts = (Path(f"/proc/self/{name}").read_text(errors="replace") for name in ("mountinfo", "cgroup"))
        (kind, folder), *_ = budget.control_groups("memory", *texts)
        name, file = {"cgroup": ("v1", "memory.limit_in_bytes"), "cgroup2": ("v2", "memory.max")}[kind]
        group = Path(folder, f"gdsdata-{uuid.uuid4().hex}")
        group.mkdir()
    except (ValueError, OSError) as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / file).write_text(str(limit_bytes))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"control groups {name} of this machine limit no memory: {error}")
    return group


TRIAL = """
    import os, sys, warnings
    group, kind, path = sys.argv[1:]
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
    warnings.simplefilter("ignore")
    import gdsdata
    from gdsdata.formats import Records
    how = {"lanes": (Records("uint8", (4096,)),), "parquet": ()}[kind]
    shuffle = "lanes" if kind == "lanes" else True
    batches = iter(gdsdata.GDSDataset(path, 256, *how, shuffle=shuffle, device="cpu"))
    for _ in range(2):
        next(batches)
    print("alive", flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit_mib", [400, 600])
@pytest.mark.parametrize("kind", ["lanes", "parquet"])
def test_data_larger_than_a_container_is_read_within_its_limit(tmp_path, kind, limit_mib):
    path = tmp_path / f"a.{kind}"
    if kind == "lanes":
        path.touch()
        os.truncate(path, 2 * GIB)  # zeros, which take no space
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = pa.FixedSizeListArray.from_arrays(pa.array(np.random.default_rng(0).random(2**20, np.float32)), 1024)
        table = pa.table({"x": rows})
        with parquet.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
            for _ in range(160):  # row groups of 4 MiB
                writer.write_table(table)
    group = limited_group(limit_mib * MIB)
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRIAL), str(group), kind, str(path)], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
