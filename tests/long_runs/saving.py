"""Workloads that save and load: in the background, at once, and to storage that fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gdsdata
from gdsdata import AsyncCheckpointer, EngineOptions, GDSDataset
from gdsdata.errors import IoError, SaveAborted
from long_runs.made_data import make
from long_runs.world import Workload, World

ELEMENTS = 200_000
SMALL = 40  # tensors of a few elements


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step: known by the step alone."""
    large = torch.arange(ELEMENTS, dtype=torch.float32).mul_(1.25).add_(step)
    small = {f"small.{place}": torch.full((place + 1,), step * 100 + place) for place in range(SMALL)}
    return {"large": large, "half": large[:5001].to(torch.bfloat16), **small}


def empty_state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}


def check_state(state: dict[str, torch.Tensor], step: int) -> None:
    expected = state_of(step)
    assert state.keys() == expected.keys(), f"step {step}: other names"
    wrong = [name for name, tensor in expected.items() if not torch.equal(state[name].cpu(), tensor)]
    assert not wrong, f"step {step}: {wrong} are not what was saved"


class BackgroundSaves(Workload):
    """Trains, saves in the background with uploads, and restores from the folder and the store."""

    KEEP = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.made = make("records", 0, 6)
        self.made.write(world.subfolder("data", "trained"))
        self.step, self.makes = 0, 0
        self.data_states: dict[int, dict[str, Any]] = {}
        self.checkpointer: AsyncCheckpointer | None = None
        self.handles: list[Any] = []
        self.open()

    def open(self) -> None:
        self.makes += 1
        self.checkpointer = AsyncCheckpointer(
            self.world.folder / "checkpoints",
            keep_last=self.KEEP,
            staging_bytes="64MiB",
            upload=self.world.client.url("checkpoints/run"),
            upload_keep_last=self.KEEP,
        )
        self.dataset = self.trained_data()
        self.batches = iter(self.dataset)

    def trained_data(self) -> GDSDataset:
        return GDSDataset(
            self.world.folder / "data" / "trained", 8, seed=1, device=self.world.device, on_break="restart",
            **self.made.arguments,
        )  # fmt: skip

    def turn(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.train()
        self.save()
        draw = self.random.random()
        if draw < 0.2:
            self.restore(self.checkpointer, self.world.folder / "checkpoints")
        elif draw < 0.25:
            self.from_the_store()
        elif draw < 0.3:
            self.handles[-1].result(60)
            self.checkpointer.close(wait_for_uploads=self.random.random() < 0.5)
            self.open()

    def train(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.dataset)
            batch = next(self.batches)
            self.counts.add(epochs=1)
        self.made.numbers(batch)
        self.step += 1
        self.counts.add(batches=1, steps=1)

    def save(self) -> None:
        state = {name: tensor.to(self.world.device) for name, tensor in state_of(self.step).items()}
        self.data_states[self.step] = self.dataset.state_dict()
        for step in sorted(self.data_states)[:-20]:
            del self.data_states[step]
        handle = self.checkpointer.save(self.step, {"model": state, "data": self.dataset, "step": self.step})
        for tensor in state.values():
            tensor.zero_()  # what is saved is a copy
        self.handles = [*self.handles, handle][-2:]
        self.counts.add(saves=1)

    def restore(self, checkpointer: AsyncCheckpointer, where: Path) -> int:
        target = {"model": empty_state(), "data": self.trained_data(), "step": -1}
        step = checkpointer.restore(target, verify=self.random.random() < 0.5)
        assert step is not None and step == target["step"], f"{where}: {step}, and not {target['step']}"
        check_state(target["model"], step)
        if step in self.data_states:
            assert target["data"].state_dict() == self.data_states[step], f"{where}: another place in the data"
        self.counts.add(restores=1)
        return step

    def from_the_store(self) -> None:
        """Restore in an empty folder, so from what was uploaded."""
        self.handles[-1].result(60)
        try:
            self.handles[-1].upload_result(120)
        except SaveAborted:  # skipped: a newer one goes first
            return
        self.checkpointer.close()
        elsewhere = self.world.folder / "checkpoints-elsewhere"
        with AsyncCheckpointer(elsewhere, upload=self.world.client.url("checkpoints/run")) as other:
            found = self.restore(other, elsewhere)
        assert found == self.step, f"the store has step {found}, and {self.step} was uploaded"
        self.counts.add(remote_restores=1)
        self.open()

    def close(self) -> None:
        self.checkpointer.close()


class DirectSaves(Workload):
    """Saves files and objects over older ones, and loads them."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.step = 0

    def turn(self) -> None:
        self.step += 1
        name = f"{self.random.randrange(2)}.{self.random.choice(('pt', 'safetensors'))}"
        if self.random.random() < 0.5:
            path: Any = self.world.subfolder("saved") / name
        else:
            path = self.world.client.url(f"saved/{name}")
        gdsdata.save(state_of(self.step), path)
        found = gdsdata.load(path, verify=self.random.random() < 0.5 and name.endswith(".pt"))
        check_state(found, self.step)
        self.counts.add(saves=1, restores=1)


class FailingSaves(Workload):
    """Saves to storage that fails: the file is the old or the new one."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.step = self.saved = 0
        self.path = world.subfolder("saved") / "failing.pt"

    def turn(self) -> None:
        if not self.saved:
            gdsdata.save(state_of(0), self.path)
        self.step += 1
        options = EngineOptions(faults=f"seed={self.random.randrange(99)},fail={self.random.choice((0.0, 0.2, 1))}")
        if self.attempt(lambda: gdsdata.save(state_of(self.step), self.path, options=options)):
            self.saved = self.step
        check_state(gdsdata.load(self.path), self.saved)
        self.counts.add(restores=1)

    def attempt(self, save: Callable[[], object]) -> bool:
        try:
            save()
        except IoError:
            self.counts.add(faults_seen=1)
            return False
        self.counts.add(saves=1)
        return True
