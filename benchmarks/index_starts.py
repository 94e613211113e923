"""Start data sets of very many files or samples: the first time, and with the index that was kept.

    python benchmarks/index_starts.py [--only npy tar mds litdata parquet slow] [--npy 1000000]
        [--tar 10000000] [--mds 10000] [--litdata 10000] [--parquet 5000] [--slow 2000]
        [--open-ms 2] [--rounds 3] [--folder F]

Numbers are files, samples of tar shards, or shards. Each kind is made, measured and removed in
turn. Tar shards after the first 50 are hard links to these: they take no space, and their headers
are followed like those of any other.

Each start is a process of its own, a fork of one that has imported gdsdata. Its user cache is a
folder of the round, which is empty for the first start. Any index is kept, also one that took less
than half a second. Seconds are those of `GDSDataset(folder)`, and the peak is memory beyond that
before. Both starts must give the same number of samples and the same first batch of a shuffled
epoch. The files are in the page cache.

`slow` is so many files of each kind whose opens and looks by name take 2 ms longer, as on a
network, though several may wait at once. A library for LD_PRELOAD (slow_opens.c) sleeps in these
calls, so a C compiler is needed.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from turns import processes

import gdsdata
from gdsdata.data import indexing

BATCH, SEED = 256, 7
A_TAR, TARS = 10_000, 50  # samples of a tar; tars that are no links
A_SHARD, A_TABLE = 100, 1000  # samples
A_SLOW = 100  # samples of a file with slow opens

# ---------------------------------------------------------------------------------------------------------------- data


def write_npy(folder, files):
    """Write arrays of three numbers."""
    np.save(folder / "first.npy", np.zeros(3, np.int64))
    head = (folder / "first.npy").read_bytes()[:-24]
    (folder / "first.npy").unlink()
    for number in range(files):
        file = os.open(f"{folder}/{number:08}.npy", os.O_CREAT | os.O_WRONLY | os.O_EXCL)
        os.write(file, head + np.array([number, -number, 7]).tobytes())
        os.close(file)


def tar_of(first, samples):
    """Return a tar of samples with an image of 8 bytes and a label of one."""
    digits = np.array([f"{number:08}".encode() for number in range(first, first + samples)]).view(np.uint8)
    digits, archive = digits.reshape(samples, 8), np.zeros((samples, 4, 512), np.uint8)
    for place, (extension, size) in enumerate((("jpg", 8), ("cls", 1))):
        member, header = tarfile.TarInfo(f"{0:08}.{extension}"), archive[:, 2 * place]
        member.size = size
        header[:] = np.frombuffer(member.tobuf(tarfile.USTAR_FORMAT), np.uint8)
        header[:, :8], header[:, 148:156] = digits, ord(" ")
        sums = "".join(f"{total:06o}\0 " for total in header.sum(axis=1, dtype=np.int64).tolist())
        header[:, 148:156] = np.frombuffer(sums.encode(), np.uint8).reshape(samples, 8)
        archive[:, 2 * place + 1, :size] = digits[:, -size:]
    return archive.tobytes() + bytes(1024)


def write_tar(folder, samples, a_tar=A_TAR):
    for number, first in enumerate(range(0, samples, a_tar)):
        path = folder / f"{number:06}.tar"
        if number >= TARS and samples - first >= a_tar:
            os.link(folder / f"{number % TARS:06}.tar", path)
        else:
            path.write_bytes(tar_of(first, min(a_tar, samples - first)))


def contents_of(shards):
    """Yield lists of samples: each is its number, as 4 to 7 bytes."""
    for shard in range(shards):
        yield [b"%d" % number for number in range(1000 + shard * A_SHARD, 1000 + (shard + 1) * A_SHARD)]


def write_mds(folder, shards):
    import fields  # late: each start imports this script, and needs no other formats for it

    fields.write_mds_shards(folder, contents_of(shards))


def write_litdata(folder, chunks):
    import fields  # late, as above

    fields.write_litdata_chunks(folder, contents_of(chunks))


def write_parquet(folder, files, a_table=A_TABLE):
    import pyarrow
    from pyarrow import parquet

    for file in range(files):
        numbers = np.arange(file * a_table, (file + 1) * a_table)
        table = pyarrow.table({"number": numbers, "half": numbers / 2, "label": numbers % 10})
        parquet.write_table(table, folder / f"{file:06}.parquet")


WRITERS = {"npy": write_npy, "tar": write_tar, "mds": write_mds, "litdata": write_litdata, "parquet": write_parquet}
SLOW_WRITERS = WRITERS | {
    "tar": lambda folder, files: write_tar(folder, files * A_SLOW, A_SLOW),
    "parquet": lambda folder, files: write_parquet(folder, files, A_SLOW),
}


def made_long_ago(write, folder, count):
    """Write data. No index is kept of files that have just changed, so they get an older time."""
    write(folder, count)
    names = os.listdir(folder)
    for name in names:
        os.utime(folder / name, (1e9, 1e9))
    os.utime(folder, (1e9, 1e9))
    return len(names)


# -------------------------------------------------------------------------------------------------------------- starts


def memory_mb(name):
    """Return VmRSS, or VmHWM: the most that it was."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith(f"{name}:"))


def digest_of(value):
    """Return a digest of a batch's names, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        said = f"{value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        said = "".join(f"{name}:{digest_of(one)}" for name, one in value.items()).encode()
    else:
        said = "".join(map(digest_of, value)).encode()  # a Ragged, or a list
    return hashlib.sha256(said).hexdigest()


def start(folder, environment):
    """Start a data set in this process, and return what that cost and what it gave."""
    os.environ |= environment
    indexing.WORTH_S = 0.0
    before_mb, began, cpu = memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    dataset = gdsdata.GDSDataset(folder, BATCH, device="cpu", seed=SEED)
    taken = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    taken |= {"peak_mb": memory_mb("VmHWM") - before_mb, "samples": dataset.samples}
    return taken | {"first_batch": digest_of(next(iter(dataset)))}


def preload_slow_opens(folder):
    """Have processes that begin from now on slow down opens of the files that are named then."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("index_starts: no C compiler is here to build slow_opens.c: leave slow out of --only")
    library, source = Path(folder, "slow_opens.so"), Path(__file__).with_name("slow_opens.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.glob("*")) if folder.is_dir() else 0


def measured(kind, data, folder, rounds, environment):
    """Return first starts, later ones, and bytes that were kept: of the index, and of each tar."""
    both = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            for starts in both:
                with processes.Pool(1) as fresh:
                    starts.append(fresh.apply(start, (str(data), {**environment, "XDG_CACHE_HOME": cache})))
            kept = [bytes_in(Path(cache, "gdsdata", part)) for part in ("index", "tar")]
    for name in ("samples", "first_batch"):
        if len({one[name] for starts in both for one in starts}) > 1:
            raise SystemExit(f"index_starts: {name} of {kind} differ between starts")
    return *both, kept


def print_row(kind, files, firsts, laters, kept):
    cells = [kind, f"{files}", f"{firsts[0]['samples']}"]
    for starts in (firsts, laters):
        for name, digits in (("seconds", 2), ("cpu_s", 2), ("peak_mb", 0)):
            cells.append(f"{statistics.median(one[name] for one in starts):.{digits}f}")
    of_index, of_tars = (f"{count / firsts[0]['samples']:.2f}" for count in kept)
    print(f"| {' | '.join(cells)} | {of_index} | {of_tars if kept[1] else ''} |", flush=True)


def print_kind(title, write, count, given, environment):
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made).resolve()
        data = folder / "data"
        data.mkdir()
        files = made_long_ago(write, data, count)
        environment = {**environment, "SLOW_BELOW": str(data)}
        print_row(title, files, *measured(title, data, folder, given.rounds, environment))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*WRITERS, "slow"], default=[*WRITERS, "slow"])
    counts = {"npy": 1_000_000, "tar": 10_000_000, "mds": 10_000, "litdata": 10_000, "parquet": 5_000, "slow": 2_000}
    for kind, count in counts.items():
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--open-ms", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where a folder for the files is made")
    given = parser.parse_args()
    print(f"Medians of {given.rounds} rounds. First starts, then later ones; bytes for each sample.\n")
    starts = " | ".join(f"{which} s | CPU s | peak MB" for which in ("first", "later"))
    print(f"| data | files | samples | {starts} | kept index, bytes | kept of each tar, bytes |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(dir=given.folder) as library:
        if "slow" in given.only:
            preload_slow_opens(library)
        processes.set_forkserver_preload(["torch", "gdsdata.data.dataset"])
        for kind in (kind for kind in given.only if kind != "slow"):
            print_kind(kind, WRITERS[kind], getattr(given, kind), given, {"SLOW_US": "0"})
        if "slow" in given.only:
            slow = {"SLOW_US": str(round(given.open_ms * 1000))}
            for kind, write in SLOW_WRITERS.items():
                print_kind(f"{kind}, opens of {given.open_ms:g} ms", write, given.slow, given, slow)


if __name__ == "__main__":
    main()
