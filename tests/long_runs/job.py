"""The training job of the chaos: one process a rank, each a fork of the controller."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gdsdata import AsyncCheckpointer, GDSDataset, Sharding
from gdsdata.checkpoint.urls import is_url
from gdsdata.errors import IoError, SaveAborted
from long_runs.made_data import make
from long_runs.store import key_until
from long_runs.wall_clock import Clocks

STEP_SAMPLES = 12  # of all ranks together: two, three and four ranks share them
STEPS = 64  # four epochs
SAVE_EVERY = 3
STEPS_S = (0.06, 0.06, 0.25)  # of a step: the slowest outlives keys of the store
KEYS_END_S = 6.0  # a refusal of keys that were fetched 5 s ago is of the keys before them
UPLOADS = "checkpoints/job"


@dataclass(frozen=True)
class Attempt:
    """One start of the job.

    Attributes:
        each_saves: all ranks save their states; else the first one saves for all, and the number
            of ranks may change from start to start.
        data: a folder, or the URL of objects.
        cache: of objects.
        cache_bytes: None, or fewer than the data have.
        clocks: rank 0 follows the first slot. None: all clocks are right.
    """

    number: int
    ranks: int
    each_saves: bool
    shuffle: bool | str
    data: str
    cache: Path
    cache_bytes: str | None
    clocks: Clocks | None
    checkpoints: Path
    log: Path
    upload: str
    steps: int
    step_s: float


def data_set(
    data: str, shuffle: bool | str, sharding: Sharding | None = None, batch_size: int = STEP_SAMPLES, **remote: object
):
    made = make("records", 0, 9)
    return made, GDSDataset(
        data, batch_size, seed=3, shuffle=shuffle, device="cpu", sharding=sharding, on_break="restart",
        **made.arguments, **remote,
    )  # fmt: skip


def credentials() -> dict[str, object]:
    """Return options of the store, whose keys end after a while by the right clock."""
    right, begun = time.time(), time.monotonic()

    def keys() -> dict[str, object]:
        ends = right + time.monotonic() - begun + KEYS_END_S
        return {
            "access_key_id": key_until(ends),
            "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
            "session_token": "of the chaos",
            "expires_at": ends,
        }

    return {"credentials": keys}


def model_after(model: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """Return what a step makes of the model: it depends on every sample of every step so far."""
    mixed = torch.from_numpy(np.array(sorted(numbers), np.int64)).repeat(len(model) // len(numbers) + 1)[: len(model)]
    return (model * 31 + mixed + 1) % 1_000_003


def first_model() -> torch.Tensor:
    return torch.arange(60_000, dtype=torch.int64)


def start(attempt: Attempt, rank: int) -> int:
    """Fork a rank, and return its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1)
        warnings.simplefilter("ignore")
        options = credentials()  # before the clock is wrong
        if attempt.clocks is not None:
            attempt.clocks.follow(rank)
        run(attempt, rank, options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(attempt: Attempt, rank: int, options: dict[str, object]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{attempt.log}/ranks-{attempt.number}", rank=rank, world_size=attempt.ranks,
        timeout=timedelta(seconds=40),
    )  # fmt: skip
    alone = dist.new_group([0])
    remote = {"cache": attempt.cache, "cache_bytes": attempt.cache_bytes, "storage_options": options}
    made, dataset = data_set(
        attempt.data, attempt.shuffle, batch_size=STEP_SAMPLES // attempt.ranks,
        **(remote if is_url(attempt.data) else {}),
    )  # fmt: skip
    state = {"model": first_model(), "step": 0, "data": dataset}
    checkpointer = None
    if attempt.each_saves or rank == 0:
        group = None if attempt.each_saves else alone
        checkpointer = AsyncCheckpointer(
            attempt.checkpoints, keep_last=2, staging_bytes="64MiB", upload=attempt.upload, upload_keep_last=2,
            process_group=group, timeout_s=40,
        )  # fmt: skip
        checkpointer.restore(state, verify=True)
    if not attempt.each_saves:
        shared = [{name: one.state_dict() if name == "data" else one for name, one in state.items()}]
        dist.broadcast_object_list(shared)
        state = {**shared[0], "data": dataset}
        if rank:
            dataset.load_state_dict(shared[0]["data"])
    note(attempt, rank, restored=state["step"])
    train(attempt, rank, made, state, checkpointer)
    if checkpointer is not None:
        checkpointer.close()
    dist.barrier()


def train(attempt: Attempt, rank: int, made, state: dict, checkpointer: AsyncCheckpointer | None) -> None:
    model, step, saving = state["model"], state["step"], None
    while step < attempt.steps:
        for batch in state["data"]:
            shares = [torch.zeros(len(batch), dtype=torch.int64) for _ in range(attempt.ranks)]
            dist.all_gather(shares, torch.tensor(made.numbers(batch)))
            numbers = torch.cat(shares).tolist()
            model, step = model_after(model, numbers), step + 1
            note(attempt, rank, step=step, numbers=sorted(numbers))
            if checkpointer is not None and step % SAVE_EVERY == 0:
                saving = save(attempt, rank, checkpointer, saving, {**state, "model": model, "step": step})
            time.sleep(attempt.step_s)
            if step == attempt.steps:
                break
    if saving is not None:
        noted(attempt, rank, saving)


def save(attempt: Attempt, rank: int, checkpointer: AsyncCheckpointer, before, state: dict):
    """Save, and note whether the save before this one is complete. A full disk fails saves."""
    if before is not None:
        noted(attempt, rank, before)
    try:
        return checkpointer.save(state["step"], state)
    except (IoError, SaveAborted) as error:
        note(attempt, rank, failed=state["step"], error=repr(error)[:200])
        return None


def noted(attempt: Attempt, rank: int, saving) -> None:
    try:
        saving.result(40)
        note(attempt, rank, committed=saving.step)
    except (IoError, SaveAborted) as error:
        note(attempt, rank, failed=saving.step, error=repr(error)[:200])


def note(attempt: Attempt, rank: int, **what: object) -> None:
    """Append a line to the rank's log. It outlives a kill."""
    with open(attempt.log / f"{attempt.number:03}-{rank}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")
