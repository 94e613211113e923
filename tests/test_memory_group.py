"""An epoch over files ten times the size of a control group's memory stays within it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import MIB, drop_cache, require_direct

from gdsdata.io import budget

pytestmark = pytest.mark.slow

ROOM_BYTES = 256 * MIB  # of the group, beside what interpreter and torch take
FILES, FILE_BYTES, RECORD_BYTES = 5, 2 * ROOM_BYTES, 256 * 1024
# Word i of all files is i * STEP modulo 2**64.
STEP = 0x9E3779B97F4A7C15
# The disk is shared with whatever else runs: the best of some turns counts.
TURNS, LEAST_OF_DISK = 4, 0.8

PROGRAM = """
    import itertools, json, mmap, os, sys, threading, time
    from pathlib import Path

    group, folder, room_bytes, record_bytes, step, turns, direct, through_cache = json.loads(sys.argv[1])
    Path(group, "cgroup.procs").write_text(str(os.getpid()))

    import numpy as np
    import gdsdata
    from gdsdata.formats import Records

    paths = sorted(map(str, Path(folder).iterdir()))
    record_words, size_bytes = record_bytes // 8, sum(map(os.path.getsize, paths))
    options = gdsdata.EngineOptions(direct=direct)
    dataset = gdsdata.GDSDataset(
        paths, 32, Records("u1", (record_bytes,)), device="cpu", reading=gdsdata.Reading(options=options)
    )
    for usage, limit in (("memory.usage_in_bytes", "memory.limit_in_bytes"), ("memory.current", "memory.max")):
        if Path(group, usage).exists():
            used_bytes = int(Path(group, usage).read_text())
            Path(group, limit).write_text(str(used_bytes + room_bytes))

    if through_cache:
        for path in paths:
            with open(path, "rb") as file:
                while file.read(2**20):
                    pass

    def check():
        row, of_words = np.arange(record_words, dtype=np.uint64) * np.uint64(step), set()
        inverse = pow(step, -1, 2**64)
        for batch in dataset:
            for words in batch.numpy().view(np.uint64):
                assert np.array_equal(words, row + words[0])
                of_words.add(int(words[0]) * inverse % 2**64)
        assert of_words == set(range(0, size_bytes // 8, record_words))

    def seconds_of(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def epoch():
        for batch in dataset:
            pass

    def plain_reads():
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        a_file = os.path.getsize(paths[0]) // record_bytes
        order = iter(np.random.default_rng(0).permutation(size_bytes // record_bytes).tolist())
        taking = threading.Lock()

        def work():
            memory = mmap.mmap(-1, record_bytes)
            while True:
                with taking:
                    record = next(order, None)
                if record is None:
                    return
                os.preadv(descriptors[record // a_file], [memory], record % a_file * record_bytes)

        threads = [threading.Thread(target=work) for _ in range(64)]  # an engine's requests in flight
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for descriptor in descriptors:
            os.close(descriptor)

    check()
    print(json.dumps([seconds_of(plain_reads) / seconds_of(epoch) for _ in range(turns)]))
"""


@contextlib.contextmanager
def group_of_its_own() -> Iterator[Path]:
    """Make a control group that counts memory, or skip the test and say why there is none."""
    if os.geteuid():
        pytest.skip("only root makes a control group")
    why = "no control group counts memory here"
    texts = (Path(f"/proc/self/{name}").read_text(errors="replace") for name in ("mountinfo", "cgroup"))
    folders: dict[str, list[str]] = {}
    for kind, folder in budget.control_groups("memory", *texts):
        folders.setdefault(kind, []).append(folder)
    for kind, its_folders in folders.items():
        parent = Path(its_folders[0] if kind == "cgroup" else its_folders[-1])
        if kind == "cgroup2" and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            continue
        group = parent / f"gdsdata-test-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError as error:
            why = f"{parent} takes no group: {error}"
            continue
        try:
            yield group
        finally:
            if (group / "memory.force_empty").exists():
                (group / "memory.force_empty").write_text("0")
            group.rmdir()
        return
    pytest.skip(why)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Files of ten times the group's room, out of the page cache."""
    folder = tmp_path_factory.mktemp("files")
    words = np.arange(FILE_BYTES // 8, dtype=np.uint64) * np.uint64(STEP)
    for number in range(FILES):
        words.tofile(folder / str(number))
        words += np.uint64(FILE_BYTES // 8 * STEP % 2**64)
    require_direct(folder / "0")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("direct", "through_cache", "turns"),
    [("auto", False, TURNS), ("auto", True, TURNS), ("never", False, 0)],
    ids=["cold", "read before through the page cache", "direct never"],
)
def test_an_epoch_over_ten_times_the_memory_of_a_group(folder, direct, through_cache, turns):
    drop_cache(*folder.iterdir())
    with group_of_its_own() as group:
        what = [str(group), str(folder), ROOM_BYTES, RECORD_BYTES, STEP, turns, direct, through_cache]
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(what)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
        while (group / "cgroup.procs").read_text():
            time.sleep(0.01)
    assert ended.returncode == 0, f"{ended.returncode} (-9: out of memory)\n{ended.stderr}"
    of_disk = json.loads(ended.stdout)
    print(f"epochs, each of the rate of plain reads beside it: {of_disk}")
    assert not turns or max(of_disk) >= LEAST_OF_DISK, of_disk
