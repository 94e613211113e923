"""Run everything at once for hours, and judge whether the program stays as large as it was.

    python tests/soak.py --hours 1
    python tests/soak.py --hours 0.02 --leak descriptors     # the judge has to find it

Data sets of files and objects, workers, forked children, saves with uploads, evictions, faults and
replaced files, in one program, whose bytes are all checked. Ends with 1 if bytes were wrong, an
error came that no fault explains, or a resource grew. docs/internals/long-runs.md says more.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from long_runs.judge import Verdict, judge  # noqa: E402
from long_runs.leaks import LEAKS  # noqa: E402
from long_runs.sampler import Sampler, children_of  # noqa: E402
from long_runs.store import Client, Store  # noqa: E402

SUBFOLDERS = ("data", "cache", "checkpoints", "checkpoints-elsewhere", "saved", "index", "temporary")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--cores", type=float, default=1.0, help="processor time that the program and the store take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="of batches; default: cuda if there is one, else cpu")
    parser.add_argument("--folder", type=Path, help="for data and checkpoints; default: a temporary one")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "soak", help="for the samples and the plot")
    parser.add_argument("--every-s", type=float, help="from sample to sample; default: 5, or a 60th of the time")
    parser.add_argument("--hang-s", type=float, default=240.0, help="of a turn or the end: more on a busy machine")
    parser.add_argument("--leak", choices=sorted(LEAKS), help="leak this on purpose")
    return parser.parse_args(given)


def device_of(given: str | None) -> str:
    if given:
        return given
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def start(settings: dict[str, Any], folder: Path, store: Store) -> subprocess.Popen:
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    (folder / "temporary").mkdir(exist_ok=True)
    own = {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XDG_CACHE_HOME": str(folder / "index"),
        "TMPDIR": str(folder / "temporary"),
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **store.environment(), **own}
    return subprocess.Popen([sys.executable, "-m", "long_runs.subject", str(path)], env=environment)


def send(number: int, processes: Sequence[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def watch(program: subprocess.Popen, sampler: Sampler, seconds: float, every_s: float, hang_s: float) -> str:
    """Sample until the program ends, and return what was wrong, or "".

    It hangs if a thread ends no turn for ``hang_s``, or if it ends later than that after its time.
    """
    began = time.monotonic()
    turns: dict[str, tuple[float, float]] = {}  # of each thread, and when they changed
    while program.poll() is None:
        try:
            row = sampler.sample()
        except OSError:
            break  # it has ended
        now = time.monotonic()
        for name, count in row.items():
            if name.startswith("count_turns_") and turns.get(name, (-1,))[0] != count:
                turns[name] = count, now
        changed = min((when for _, when in turns.values()), default=began)
        if now - changed > hang_s or now - began > seconds + hang_s:
            family = [program.pid, *children_of(program.pid)]
            send(signal.SIGUSR1, family)  # they show their stacks
            time.sleep(2)
            send(signal.SIGKILL, family)  # a worker that hangs would outlive the program
            program.wait()
            return (
                f"a thread has ended no turn for {hang_s:g} s" if now - changed > hang_s else "the program did not end"
            )
        time.sleep(every_s)
    code = program.wait()
    return "" if code == 0 else f"the program ended with {code}"


def summary(sampler: Sampler, verdicts: Sequence[Verdict], injected: dict[str, int], wrong: list[str]) -> str:
    last = sampler.rows[-1]
    count = lambda name: int(last.get(f"count_{name}", 0))  # noqa: E731
    lines = [
        f"{last['seconds']:.0f} s, {len(sampler.rows)} samples, {count('turns')} turns",
        f"{count('epochs')} epochs ({count('remote_epochs')} of objects, {count('worker_epochs')} by workers), "
        f"{count('batches')} batches, {count('dropped')} data sets dropped, {count('resumed')} epochs resumed, "
        f"{count('forks')} forks, {count('replaced')} data sets replaced",
        f"{count('saves')} saves, {count('restores')} loads compared, {count('remote_restores')} of them uploads",
        f"{sum(injected.values())} faults of the store: {json.dumps(injected)}",
        f"{count('faulty_epochs')} epochs over storage with faults to recover from; {count('faults_seen')} errors "
        "that were to come",
        *map(str, verdicts),
        *(f"WRONG: {one}" for one in wrong),
        f"{count('wrong')} errors; {sum(not one.is_flat for one in verdicts)} series are not flat",
    ]
    return "\n".join(lines)


def run(given: argparse.Namespace, folder: Path) -> int:
    seconds = given.hours * 3600
    given.out.mkdir(parents=True, exist_ok=True)
    (folder / "counts.json").unlink(missing_ok=True)
    store = Store()
    settings = {
        "folder": str(folder), "seconds": seconds, "cores": given.cores, "seed": given.seed, "leak": given.leak,
        "device": device_of(given.device), "endpoint_url": store.endpoint_url, "store_pid": store.process.pid,
        "counts": str(folder / "counts.json"), "child_s": given.hang_s / 2,
    }  # fmt: skip
    program = start(settings, folder, store)
    sampler = Sampler(program.pid, folder, folder / "counts.json", given.out / "samples.csv", SUBFOLDERS)
    try:
        problem = watch(program, sampler, seconds, given.every_s or min(5.0, seconds / 60), given.hang_s)
        injected = Client(store.endpoint_url).counts()["faults"]
    finally:
        if program.poll() is None:
            program.kill()
        store.close()
        sampler.write()
    rows = [row for row in sampler.rows if row["seconds"] <= seconds]  # not its end, when it releases all
    verdicts = judge(rows)
    said = summary(sampler, verdicts, injected, [problem] if problem else [])
    (given.out / "summary.txt").write_text(said + "\n")
    print(said)
    draw_plot(given, rows, verdicts)
    return 1 if problem or not all(one.is_flat for one in verdicts) else 0


def draw_plot(given: argparse.Namespace, rows: list, verdicts: Sequence[Verdict]) -> None:
    try:
        from long_runs.plot import draw

        draw(rows, verdicts, given.out / "soak.svg", f"python tests/soak.py --hours {given.hours:g}")
    except ImportError:
        print("there is no plot: matplotlib is not installed")


def main(given: Sequence[str] | None = None) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    chosen = arguments(given)
    if chosen.folder:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        return run(chosen, chosen.folder)
    with tempfile.TemporaryDirectory(prefix="gdsdata-soak-") as folder:
        return run(chosen, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
