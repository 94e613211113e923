"""Kill, stop and starve a training job in random order, and check what it did.

    python tests/chaos.py --seed 7 --minutes 5
    python tests/chaos.py --seed 7 --jobs 1       # one job, which is repeated by its seed

Two to four ranks train on files or cached objects, and save model and place in the data together,
in a folder and in an object store. Ranks are killed or stopped, the disk is full, the store
restarts and fails, the ranks' wall clocks are moved, files get other times, and the folder is lost.
docs/internals/long-runs.md says what has to hold. A failure prints the seed and the events.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from long_runs import job, wall_clock  # noqa: E402
from long_runs.made_data import make  # noqa: E402
from long_runs.store import BUCKET, Client, Store  # noqa: E402

from gdsdata import Sharding  # noqa: E402

HANG_S = 100  # from the last event to the end of all processes
MOST_STARTS = 8  # of a job; the last one is left alone
DISK_MIB = 24
PASSING = ("reset_before", "reset_after", "reset_within", "close_before", "short", "status_500", "status_503", "slow")


# The events that are counted, and their names in the summary.
KINDS = {
    "kill": "ranks killed",
    "stop": "ranks stopped",
    "fill": "disks full",
    "restart": "store restarts",
    "faults": "spells of failing requests",
    "clock": "clocks moved at a start",
    "moved": "clocks moved in training",
    "times": "changes of file times",
    "lost": "folders lost",
}
HOUR_S = 3600.0
CLAIM = ": every claim held"


class Broken(AssertionError):
    """Something that has to hold does not."""


class Job:
    """One job, from its first start to its end, with everything that happens to it."""

    def __init__(
        self, seed: int, folder: Path, store: Store, steps: int = job.STEPS, clocks: wall_clock.Clocks | None = None
    ) -> None:
        self.steps, self.clocks = steps, clocks
        self.random, self.folder, self.store = random.Random(seed), folder, store
        self.client = Client(store.endpoint_url)
        self.each_saves = self.random.random() < 0.4
        self.shuffle = self.random.choice((True, "lanes", False))
        self.ranks = self.random.choice((2, 3, 4))
        self.key = f"{job.UPLOADS}-{seed}-{os.getpid()}"
        self.log, self.disk = folder / "log", folder / "disk"
        for path in (self.log, self.disk):
            path.mkdir()
        self.has_disk = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", self.disk], capture_output=True
        ).returncode == 0  # fmt: skip
        self.checkpoints = self.disk / "checkpoints"
        self.events: list[str] = []
        self.counts: Counter[str] = Counter()
        self.data = self.make_data(f"data-{seed}-{os.getpid()}")
        self.step_s = self.random.choice(job.STEPS_S)
        self.cache_bytes = self.random.choice((None, "2MiB"))
        self.committed = 0
        self.models: list[torch.Tensor] = [job.first_model()]
        self.order: list[list[int]] = []

    def close(self) -> None:
        if self.has_disk:
            subprocess.run(["umount", "-l", self.disk], check=False)

    def make_data(self, name: str) -> str:
        """Write the data set to a folder or to the store, and return its path or URL."""
        made = make("records", 0, 9)
        if self.random.random() < 0.5:
            made.write(self.folder / name)
            return str(self.folder / name)
        self.counts["objects"] += 1
        for file, content in made.files.items():
            self.client.put(f"{name}/{file}", content)
        return self.client.url(f"{name}/*.bin")

    def happened(self, kind: str, what: str, count: int = 1) -> None:
        self.counts[kind] += count
        self.events.append(what)

    def run(self) -> None:
        self.expect()
        for number in range(MOST_STARTS):
            if self.attempt(number, is_left_alone=number == MOST_STARTS - 1):
                break
        self.check_uploads(is_complete=True)

    def expect(self) -> None:
        """Compute the uninterrupted order, in a process that has its own engine."""
        receiver, sender = os.pipe()
        if os.fork() == 0:
            made, dataset = job.data_set(self.data, self.shuffle, Sharding(0, 1))
            order = [sorted(made.numbers(batch)) for _ in range(4) for batch in dataset]
            os.write(sender, json.dumps(order).encode())
            os._exit(0)
        os.close(sender)
        with open(receiver) as file:
            self.order = json.load(file)
        os.wait()
        for numbers in self.order:
            self.models.append(job.model_after(self.models[-1], numbers))

    def attempt(self, number: int, is_left_alone: bool) -> bool:
        """Start the job, have things happen to it, and check what it left. True: it has ended."""
        if number and not self.each_saves:
            self.ranks = self.random.choice((2, 3, 4))
        attempt = job.Attempt(
            number, self.ranks, self.each_saves, self.shuffle, self.data, self.folder / "cache", self.cache_bytes,
            self.clocks, self.checkpoints, self.log, self.client.url(self.key), self.steps,
            self.step_s,
        )  # fmt: skip
        self.happened("start", f"start {number}: {self.ranks} ranks on {self.data}")
        if self.clocks is not None and self.random.random() < 0.6:
            self.move_clocks(range(self.ranks), "clock")
        sys.stdout.flush(), sys.stderr.flush()
        with silenced(self.folder / f"said-{number}"):
            ranks = [job.start(attempt, rank) for rank in range(self.ranks)]
        killed = False
        try:
            if not is_left_alone:
                killed = self.disturb(ranks)
            codes = self.wait_for(ranks)
        finally:
            for pid in ranks:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        said = (self.folder / f"said-{number}").read_text()
        if not killed and any(codes):
            raise Broken(f"ranks ended with {codes}, and none was killed:\n{said[-3000:]}")
        self.check_log(number)
        self.check_folder()
        self.check_uploads()
        self.between_starts()
        return not any(codes)

    # ------------------------------------------------------------------------------------------- events

    def disturb(self, ranks: list[int]) -> bool:
        """Have some things happen, and return whether a rank was killed."""
        time.sleep(0.5 + self.random.random())  # they meet
        events = [self.kill, self.kill, self.stop, self.restart, self.faults]
        events += [self.fill] if self.has_disk else []
        events += [self.move, self.move] if self.clocks is not None else []
        for _ in range(self.random.randint(1, 5)):
            if self.random.choice(events)(ranks):
                return True
            time.sleep(self.random.random() * 0.7)
        return False

    def kill(self, ranks: list[int]) -> bool:
        chosen = self.random.sample(range(len(ranks)), self.random.randint(1, len(ranks)))
        self.happened("kill", f"kill ranks {chosen}", len(chosen))
        for rank in chosen:
            os.kill(ranks[rank], signal.SIGKILL)
        return True

    def stop(self, ranks: list[int]) -> bool:
        rank, seconds = self.random.randrange(len(ranks)), self.random.uniform(0.2, 3)
        self.happened("stop", f"stop rank {rank} for {seconds:.1f} s")
        os.kill(ranks[rank], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(ranks[rank], signal.SIGCONT)
        return False

    def fill(self, ranks: list[int]) -> bool:
        seconds = self.random.uniform(0.3, 1.5)
        self.happened("fill", f"the disk is full for {seconds:.1f} s")
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        time.sleep(seconds)
        filler.unlink()
        return False

    def restart(self, ranks: list[int]) -> bool:
        seconds = self.random.uniform(0.1, 1.5)
        self.happened("restart", f"the store restarts in {seconds:.1f} s")
        threading.Thread(target=self.store.restart, args=(seconds,)).start()
        return False

    def faults(self, ranks: list[int]) -> bool:
        self.happened("faults", "a tenth of the store's requests fail")
        self.client.set_plan(seed=self.random.randrange(1000), share=0.1, kinds=PASSING, slow_bytes_per_s=2e6)
        return False

    def move(self, ranks: list[int]) -> bool:
        """Move clocks some times while the ranks train."""
        for _ in range(self.random.randint(1, 4)):
            self.move_clocks(self.random.sample(range(len(ranks)), self.random.randint(1, len(ranks))), "moved")
            time.sleep(self.random.random() * 0.3)
        return False

    def move_clocks(self, ranks: Sequence[int], kind: str) -> None:
        """Set wall clocks of ranks to times within days of the right one, together or apart."""
        assert self.clocks is not None
        together = self.random.random() < 0.5
        by_s = 0.0
        for place, rank in enumerate(ranks):
            if place == 0 or not together:
                by_s = self.random.choice((0.0, 90.0, HOUR_S, 12 * HOUR_S, 60 * HOUR_S)) * self.random.uniform(-1, 1)
            self.clocks.move(rank, by_s)
            self.happened(kind, f"the clock of rank {rank} is wrong by {by_s:+.0f} s")

    def between_starts(self) -> None:
        with self.store.restarting:
            pass  # it is up again
        self.client.set_plan()
        if self.random.random() < 0.3:
            self.happened("times", "files of checkpoints get other times")
            for path in self.checkpoints.rglob("*"):
                when = time.time() + self.random.choice((-1e6, -1e4, 1e4, 1e6))
                with contextlib.suppress(OSError):
                    os.utime(path, (when, when))
        if self.random.random() < 0.15:
            self.happened("lost", "the folder is lost")
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            self.committed = max(self.steps_there(), default=0)

    # ------------------------------------------------------------------------------------------- claims

    def wait_for(self, ranks: list[int]) -> list[int]:
        """Return the exit codes. A process that outlives the limit breaks a claim."""
        codes: dict[int, int] = {}
        until = time.monotonic() + HANG_S
        while len(codes) < len(ranks):
            for pid in set(ranks) - set(codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
            if time.monotonic() > until:
                left = [rank for rank, pid in enumerate(ranks) if pid not in codes]
                for rank in left:
                    os.kill(ranks[rank], signal.SIGUSR1)
                time.sleep(1)
                raise Broken(f"ranks {left} still ran after {HANG_S} s")
        return [codes[pid] for pid in ranks]

    def check_log(self, number: int) -> None:
        """Check that the uninterrupted order was trained, from the restored step on."""
        before = self.committed
        for path in sorted(self.log.glob(f"{number:03}-*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            at = None
            for line in lines:
                if "restored" in line:
                    at = line["restored"]
                    if at < before:
                        raise Broken(f"{path.name}: step {before} was complete, and {at} was restored")
                elif "step" in line:
                    at += 1
                    if line["step"] != at or line["numbers"] != self.order[at - 1]:
                        raise Broken(f"{path.name}: step {line['step']}: other samples than without interruption")
            done = [line["committed"] for line in lines if "committed" in line]
            self.committed = max([self.committed, *done])

    def check_folder(self) -> None:
        """Every checkpoint that has a manifest is complete, and is what was saved."""
        steps = []
        for manifest in self.checkpoints.glob("step-*/manifest.json"):
            read = lambda name, folder=manifest.parent: (folder / name).read_bytes()  # noqa: E731
            steps.append(self.check_checkpoint(manifest.read_bytes(), read, str(manifest)))
        if self.committed and self.committed > max([*steps, *self.steps_there()], default=0):
            raise Broken(f"step {self.committed} was complete, and there are {steps}")

    def check_uploads(self, is_complete: bool = False) -> None:
        for step in self.steps_there():
            prefix = f"{BUCKET}/{self.key}/step-{step}"
            read = lambda name, prefix=prefix: self.client.ask("GET", f"{prefix}/{name}")  # noqa: E731
            self.check_checkpoint(read("manifest.json"), read, prefix)
        if is_complete and self.committed and self.committed not in self.steps_there():  # `close` has waited for it
            raise Broken(f"step {self.committed} was complete, and the store has {self.steps_there()}")

    def steps_there(self) -> list[int]:
        listed = self.client.ask("GET", f"{BUCKET}?list-type=2&prefix={self.key}/").decode()
        names = [part.partition("</Key>")[0] for part in listed.split("<Key>")[1:]]
        return [int(name.split("/")[-2].removeprefix("step-")) for name in names if name.endswith("/manifest.json")]

    def check_checkpoint(self, manifest: bytes, read, where: str) -> int:
        found = json.loads(manifest)
        step = found["step"]
        for file in found["files"]:
            content = read(file["name"])
            if len(content) != file["size_bytes"]:
                raise Broken(f"{where}: {file['name']} has {len(content)} bytes, not {file['size_bytes']}")
            state = torch.load(io.BytesIO(content), weights_only=False)
            if state["step"] != step or not torch.equal(state["model"], self.models[step]):
                raise Broken(f"{where}: {file['name']} is not what step {step} saved")
        return step


@contextlib.contextmanager
def silenced(path: Path):
    """Send stdout and stderr of processes that are forked meanwhile to a file."""
    kept = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1), os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        for descriptor in (*kept, file):
            os.close(descriptor)


def run_job(seed: int, steps: int, clocks: wall_clock.Clocks | None) -> tuple[Counter[str], bool]:
    """Run one job. Return the counts of its starts and events, and whether it had a small disk."""
    folder = Path(tempfile.mkdtemp(prefix=f"gdsdata-chaos-{seed}-"))
    store = Store()
    os.environ.update(store.environment())
    os.environ["XDG_CACHE_HOME"] = str(folder / "index")
    one = Job(seed, folder, store, steps, clocks)
    try:
        one.run()
    except BaseException:
        print(f"seed {seed} failed; its files are in {folder}. What happened:", *one.events, sep="\n  ", flush=True)
        one.disk.parent.joinpath("kept").mkdir(exist_ok=True)
        shutil.copytree(one.disk, one.disk.parent / "kept", dirs_exist_ok=True)
        raise
    finally:
        one.close()
        store.close()
    shutil.rmtree(folder, ignore_errors=True)
    return one.counts, one.has_disk


def summary(jobs: int, counts: Counter[str], has_disk: bool, has_clocks: bool) -> str:
    """Return the last line: the events by kind, and the kinds that this machine cannot have."""
    happened = ", ".join(f"{name} {counts[kind]}" for kind, name in KINDS.items() if counts[kind])
    left_out = [] if has_disk else ["full disks were left out: a tmpfs could not be mounted"]
    left_out += [] if has_clocks else ["moved clocks were left out: there is no C compiler"]
    jobs_and_starts = f"{jobs} jobs ({counts['objects']} on objects), {counts['start']} starts"
    return "; ".join([f"{jobs_and_starts}: {happened or 'no event'}", *left_out]) + CLAIM


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first job; each job has the next seed")
    parser.add_argument("--minutes", type=float, default=5.0, help="no job begins afterwards")
    parser.add_argument("--jobs", type=int, default=10**6, help="the most")
    parser.add_argument("--steps", type=int, default=job.STEPS, help=f"of a job; at most {job.STEPS}")
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)
    clocks, counts, has_disk = wall_clock.clocks(), Counter[str](), True
    until, seed = time.monotonic() + chosen.minutes * 60, chosen.seed
    while seed < chosen.seed + chosen.jobs and (seed == chosen.seed or time.monotonic() < until):
        began = time.monotonic()
        more, has_disk = run_job(seed, chosen.steps, clocks)
        counts += more
        events, took_s = sum(more[kind] for kind in KINDS), time.monotonic() - began
        print(f"seed {seed}: {more['start']} starts, {events} events, {took_s:.0f} s", flush=True)
        seed += 1
    print(summary(seed - chosen.seed, counts, has_disk, clocks is not None))
    return 0


if __name__ == "__main__":
    wall_clock.start_again()
    sys.exit(main())
