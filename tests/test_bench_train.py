"""case=train of the bench: models, feeding, errors that are found, and checkpoints' cost."""

import os
import time

import numpy as np
import pytest
import torch
from test_bench import MIB, bench, results_in, small

from gdsdata.bench import cases, settings
from gdsdata.bench import run as bench_run
from gdsdata.bench.cases.train import models
from gdsdata.bench.cases.train.case import Train, Work
from gdsdata.bench.cases.train.report import TrainLayout
from gdsdata.bench.cases.train.row import TrainRow
from gdsdata.bench.data import images, made, text
from gdsdata.bench.data import sources as data_sources
from gdsdata.bench.peers.gdsdata.batches import Batches
from gdsdata.bench.peers.torch_checkpoints import TorchSaveUnsynced

pytestmark = pytest.mark.usefixtures("quick_programs")

SLEEP_S = 0.05
with_images = pytest.mark.skipif(images.missing() != "", reason="torchvision is not installed")
WORKS = ["text", "volumes", pytest.param("images", marks=with_images)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Use one thread: beside other tests, several threads of a step would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Make small data sets when they are first needed."""
    folder, found = tmp_path_factory.mktemp("data"), {}

    def source(work):
        if work not in found:
            chosen = cases.TrainSettings(images=12, image_size=[32, 256])
            wanted = settings.DataSettings(folder=str(folder), size_bytes=MIB, seq_len=64, shape=[16, 32, 32])
            found[work] = text.source_for(work, wanted, chosen)
        return found[work]

    return source


def row_of(sources, folder, peer, work="text", device="cpu"):
    """Open a row in this process. `peer` is a key, or a class."""
    key = peer if isinstance(peer, str) else f"{__name__}:{peer.__qualname__}"
    source = sources(work)
    chosen = cases.TrainSettings(seed=1, verify_batches=2)
    return TrainRow(key, Work(work, source, 3, folder=folder), chosen, {}, device)


def dtype_of(work):
    return {"text": "raw", "volumes": "float32", "images": "uint8"}[work]


def run(row, steps=6, every=None, warm_up=2):
    row.settings.steps, row.settings.warm_up, row.settings.checkpoint_every = steps, warm_up, every
    found = row.run(dtype_of(row.work), "warm")
    row.after()
    return found


# Staged peers, found by module:Class as a user's own are.


class Slow(Batches):
    """A peer whose batches come late."""

    key = name = "slow"

    def epoch(self, epoch):
        for batch in super().epoch(epoch):
            time.sleep(SLEEP_S)
            yield batch


class OneWrongValue(Batches):
    key = name = "wrong"

    def epoch(self, epoch):
        for place, batch in enumerate(super().epoch(epoch)):
            if place == 1:
                batch[2].reshape(-1)[5] += 1
            yield batch


class OtherImage(Batches):
    """A peer that gives an image under another image's number."""

    def epoch(self, epoch):
        for batch in super().epoch(epoch):
            squares = slice(None), slice(None), slice(images.BIT_PIXELS)
            batch[1][squares[:1] + squares[2:]] = batch[0][squares[:1] + squares[2:]]
            yield batch


class DarkImages(Batches):
    def epoch(self, epoch):
        return ((batch * 0.8).to(torch.uint8) for batch in super().epoch(epoch))


class InfiniteLoss(Batches):
    def epoch(self, epoch):
        return (batch * float("inf") for batch in super().epoch(epoch))


class SlowSaver(TorchSaveUnsynced):
    def save(self, state, step):
        time.sleep(SLEEP_S)
        super().save(state, step)


class LateSaver(TorchSaveUnsynced):
    """A peer that writes the state at the time of the wait, not at the time of the save."""

    def save(self, state, step):
        self.state = state

    def wait(self):
        super().save(self.state, 0)
        return self.folder


class Saving(Batches):
    key, name, saver = "gdsdata_slowly", "gdsdata, saving slowly", SlowSaver


class SavingLate(Batches):
    saver = LateSaver


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("key", ["ceiling", "gdsdata", "dataloader"])
def test_each_work_is_verified_trained_and_timed(sources, tmp_path, key, work):
    row = row_of(sources, tmp_path, key, work)
    checked = row.verify(dtype_of(work), workers=1 if key == "dataloader" else None)
    assert checked["checked_batches"] == 4
    found = run(row)
    assert found["steps"] == 6 and found["samples"] == 18 and not found["cut"]
    assert found["bytes"] > 0 and found["stalls_s"] == [] and found["state_bytes"] == 0
    assert 0 < found["device_step_s"] <= found["seconds"] / 6
    assert 0 <= found["waiting_share"] <= found["idle_share"] + 0.02 < 1.02
    assert found["cpu_cores"] < 64
    if key == "gdsdata":
        assert "steps of" in found["verdict"] and sum(found["served"].values()) > 0
    if key == "dataloader":
        assert row.describe()["name"] == "DataLoader, 1 worker"


@pytest.mark.parametrize("work", WORKS)
def test_the_models_learn(sources, tmp_path, work):
    found = run(row_of(sources, tmp_path, "ceiling", work), steps=25)
    assert found["last_loss"] < found["first_loss"]


def test_a_slow_loader_shows_its_waiting_beside_a_ceiling_that_has_none(sources, tmp_path):
    slow = run(row_of(sources, tmp_path, Slow), steps=10)
    ceiling = run(row_of(sources, tmp_path, "ceiling"), steps=10)
    waited_s = slow["waiting_share"] * slow["seconds"]
    assert 10 * SLEEP_S <= waited_s <= slow["seconds"] and slow["next_s"] >= SLEEP_S > ceiling["next_s"]
    assert slow["idle_share"] * slow["seconds"] >= 10 * SLEEP_S
    assert ceiling["waiting_share"] * ceiling["seconds"] < SLEEP_S
    assert ceiling["seconds"] < slow["seconds"]


def test_the_number_of_workers_with_which_the_loop_is_fastest_is_taken(sources, tmp_path, monkeypatch):
    row = row_of(sources, tmp_path, "dataloader")

    def choices(on_gpu):
        slow = [type(f"Slow{name}", (Slow,), {"name": name}) for name in "ac"]
        return [slow[0], type("Fast", (Batches,), {"name": "b"}), slow[1]]

    monkeypatch.setattr(row.peer_class, "choices", choices)
    row.settings.steps = 3
    row.choose("raw", workers=None)
    assert row.peer_class.name == "b"


@pytest.mark.parametrize("work", ["text", "volumes"])
def test_one_wrong_value_of_a_batch_is_found(sources, tmp_path, work):
    with pytest.raises(ValueError, match="epoch 0, batch 1: 1 of 3 samples are not what numpy reads.*at place 2"):
        row_of(sources, tmp_path, OneWrongValue, work).verify(dtype_of(work))


@pytest.mark.parametrize("work", WORKS[2:])
@pytest.mark.parametrize(
    ("peer", "said"),
    [(OtherImage, "its images say that they are"), (DarkImages, r"image \d+ differs from what plain reading gives by")],
)
def test_wrong_images_are_found(sources, tmp_path, work, peer, said):
    with pytest.raises(ValueError, match=said):
        row_of(sources, tmp_path, peer, work).verify("uint8")


def test_a_loss_that_is_not_finite_is_an_error(sources, tmp_path):
    row = row_of(sources, tmp_path, InfiniteLoss, "volumes")
    with pytest.raises(ValueError, match="the loss of step 0 is not finite"):
        run(row)
    row.close()


def test_epochs_without_a_whole_batch_are_an_error_and_no_endless_loop(sources, tmp_path):
    row = row_of(sources, tmp_path, "gdsdata")
    row.batch_size = sources("text").samples + 1
    with pytest.raises(ValueError, match="epoch 0 had no batch of"):
        run(row)
    row.close()


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("key", ["gdsdata_saving", "dataloader_torch_save", "dataloader_dcp"])
def test_checkpoints_load_as_they_were_saved_and_their_stalls_are_counted(sources, tmp_path, key):
    row = row_of(sources, tmp_path, key)
    checked = row.verify("raw", workers=0)
    found = run(row, steps=6, every=2)
    assert len(found["stalls_s"]) == 3 and min(found["stalls_s"]) > 0
    assert checked["checked_bytes"] == found["state_bytes"], "AdamW: weights, two moments and a step count of each"
    weights = sum(tensor.nbytes for tensor in models.Training("text", [65], "cpu").model.parameters())
    assert 3 * weights < found["state_bytes"] < 3.1 * weights
    assert sum(found["stalls_s"]) <= found["idle_share"] * found["seconds"] + 1e-3
    assert os.listdir(tmp_path) == [], "no checkpoint stays"


def test_a_slow_save_shows_in_its_stall(sources, tmp_path):
    found = run(row_of(sources, tmp_path, Saving), steps=4, every=2)
    assert len(found["stalls_s"]) == 2 and min(found["stalls_s"]) >= SLEEP_S


def test_a_checkpoint_of_a_later_state_is_found(sources, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint: model\.\S+ is not what it was when it was saved"):
        row_of(sources, tmp_path, SavingLate).verify("raw")
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------ steps of a length


@pytest.mark.parametrize(("wanted_s", "repeats"), [(0.021, 10), (0.0217, 10.5), (0.001, 1), (2.001, 1000)])
def test_a_models_body_is_repeated_for_a_step_no_shorter_than_is_wanted(monkeypatch, wanted_s, repeats):
    training = models.Training("text", [65], "cpu")
    monkeypatch.setattr(training, "step_s", lambda batch: 0.001 + 0.002 * training.repeats)
    assert training.repeats_for(None, wanted_s) == repeats


def test_steps_are_timed_one_behind_the_other_as_a_loop_gives_them(monkeypatch):
    training, events, now = models.Training("text", [65], "cpu"), [], iter(range(100))
    monkeypatch.setattr(training, "step", lambda batch: events.append("step"))
    monkeypatch.setattr(models.device, "mark", lambda name: float(next(now)))
    monkeypatch.setattr(models.device, "synchronize", lambda name: events.append("waited"))
    assert training.step_s(None) == 1
    assert events.count("waited") == 1 and events[-1] == "waited"


def test_a_body_may_be_gone_through_in_part():
    body = [lambda x, i=i: [*x, i] for i in range(4)]
    assert models.through(body, [], 1.5) == [0, 1, 2, 3, 0, 1]


def test_repeats_make_a_step_longer_and_its_state_no_larger(sources):
    batch = torch.zeros(3, 65, dtype=torch.uint8)
    trainings = [models.Training("text", [65], "cpu", repeats) for repeats in (1, 40)]
    lengths = [min(training.step_s(batch) for _ in range(3)) for training in trainings]
    assert lengths[1] > 5 * lengths[0]
    sizes = [sum(tensor.nbytes for tensor in training.state().values()) for training in trainings]
    assert sizes[0] == sizes[1]


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
def test_a_run_compares_rows_with_the_ceiling_and_reports_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    rows = ["ceiling", "gdsdata", f"{__name__}:Slow", "gdsdata_saving"]
    chosen = small(tmp_path, cases.TrainSettings, case_work=["text"], case_rows=rows, case_repeats=2)
    assert bench_run.main(chosen, tmp_path) == 0, capsys.readouterr().out
    results = results_in(tmp_path)
    found = {row["key"]: row for row in results["rows"]}
    assert list(found) == ["ceiling", "gdsdata", rows[2], "gdsdata_saving"] and results["verified"]
    ceiling, ours, slow, saving = found.values()
    assert ceiling["ratio_to_limit"] == pytest.approx(1) and ceiling["path"] == "none"
    assert slow["ratio_to_limit"] < 1 and slow["waiting_share"]["min"] > ceiling["waiting_share"]["max"]
    assert ours["best_peer"] == rows[2], "the ceiling is no peer"
    assert saving["best_peer"] is None, "a row that does not save is no peer of one that saves"
    assert saving["saves"] == 4 and saving["stall_s"]["count"] == 4 and ours["saves"] == 0
    link = results["limits"]["text"]["raw, warm"]["memory_copy"]["gb_per_s"]
    assert saving["least_stall_s"] == pytest.approx(saving["state_bytes"] / link / 1e9)
    more_s = saving["wall_step_s"]["median"] - ours["wall_step_s"]["median"]
    assert saving["save_cost_s"] == pytest.approx(more_s * chosen.case.checkpoint_every)
    assert ours["save_cost_s"] is None and ours["least_stall_s"] is None
    written = (tmp_path / "report.md").read_text()
    for part in ("## text: GPT over bytes, 2 x 1,025 B a step, on cpu, warm cache", "Ceiling: ", "says of its loop"):
        assert part in written
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert [name for name in os.listdir(tmp_path / "data") if name.startswith("train-")] == []


@pytest.mark.slow
def test_a_row_with_wrong_batches_fails_the_run_and_is_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    rows = ["ceiling", f"{__name__}:OneWrongValue"]
    chosen = small(tmp_path, cases.TrainSettings, case_work=["text"], case_rows=rows)
    assert bench_run.main(chosen, tmp_path) == 1
    assert "FAILED" in capsys.readouterr().out
    wrong = results_in(tmp_path)["rows"][1]
    assert not wrong["verified"] and wrong["runs"] == [] and wrong["wall_step_s"] is None


def test_without_torchvision_images_are_left_out_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "missing", lambda: "torchvision is not installed")
    chosen = small(tmp_path, cases.TrainSettings, case_work=["images"])
    with pytest.raises(ValueError, match="nothing to measure.*images were left out: torchvision is not installed"):
        bench_run.main(chosen, tmp_path)


def test_fewer_samples_than_a_batch_are_refused(tmp_path):
    chosen = small(tmp_path, cases.TrainSettings, case_work=["volumes"], case_batch_size=64)
    with pytest.raises(made.DataError, match="volumes: 2 samples are not one batch of 64: set case.batch_size="):
        bench_run.main(chosen, tmp_path)


def test_own_text_is_read_as_bytes(tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(range(256)) * 3)
    wanted = settings.DataSettings(path=str(book), seq_len=100)
    source = text.source_for("text", wanted, cases.TrainSettings())
    assert (source.dtype, source.shape, source.samples) == ("uint8", [101], 7)
    assert data_sources.Truth(source).batch([1], "raw").tolist() == [list(range(100, 201))]


def test_made_text_follows_from_its_seed(tmp_path):
    made = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        text.write_text(tmp_path / name, 300_001, seed, lambda count: None)
        made[name] = (tmp_path / name).read_bytes()
    assert len(made["a"]) == 300_001 and made["a"] == made["b"] != made["c"]
    words = np.array([len(word) for word in made["a"].split(b" ")[:-1]])
    assert words.min() >= 1 and words.max() <= text.LONGEST_WORD + 1
    assert set(made["a"]) == {ord(" "), *range(ord("a"), ord("z") + 1)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"work": []}, "case.work=[]: name at least one of text, volumes, images"),
        ({"work": ["audio"]}, "case.work=audio: use text or volumes or images"),
        ({"steps": 0}, "case.steps=0: must be more than 0"),
        ({"step_ms": -1.0}, "case.step_ms=-1.0: must be more than 0"),
        ({"checkpoint_every": -1}, "case.checkpoint_every=-1: must be 0 or more"),
        ({"checkpoint_every": 201}, "case.checkpoint_every=201: no checkpoint within case.steps=200"),
        ({"run_seconds": 300.0}, "case.run_seconds=300.0: at most 240"),
        ({"image_size": [384]}, r"case.image_size=[384]: [height,width]"),
        ({"image_size": [8, 512]}, r"case.image_size=[8, 512]: [height,width], of 16 and 256 or more"),
        ({"images": 70_000}, "case.images=70000: at most 65536"),
        ({"images": 8, "batch_size": 16}, "case.images=8: fewer than case.batch_size=16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, said):
    chosen = settings.Settings(engine={}, case=cases.TrainSettings(**fields))
    with pytest.raises(ValueError) as raised:
        settings.check(chosen)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("every", [0, None])
def test_without_checkpoints_no_row_saves(tmp_path, every):
    chosen = settings.check(settings.Settings(engine={}, case=cases.TrainSettings(checkpoint_every=every)))
    work = Work("text", None, 8)
    rows = Train(chosen, tmp_path, None).rows_for(work, "warm")
    assert [row.key for row in rows] == ["ceiling", "gdsdata", "dataloader"]
    chosen.case.checkpoint_every = 50
    assert len(Train(chosen, tmp_path, None).rows_for(work, "warm")) == 6


def test_own_files_are_refused_where_it_is_not_said_whose_they_are(tmp_path):
    chosen = settings.Settings(engine={}, case=cases.TrainSettings())
    chosen.data.path = str(tmp_path)
    with pytest.raises(ValueError, match=r"say whose it is, case.work=\[text\] or case.work=\[volumes\]"):
        settings.check(chosen)


def test_volumes_that_are_none_are_refused(tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((64, 64), np.float32))
    chosen = small(tmp_path, cases.TrainSettings, case_work=["volumes"])
    chosen.data.path = str(tmp_path / "flat.npy")
    with pytest.raises(ValueError, match=r"data.shape=\[64, 64\]: case=train takes volumes of three sides"):
        bench_run.main(chosen, tmp_path)


@pytest.mark.slow
def test_quick_run_has_all_rows_of_all_works(tmp_path):
    ran = bench("case=train", "quick=true", f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = results_in(tmp_path)
    works = ["text", "volumes", *(["images"] if not images.missing() else [])]
    assert list(results["data"]) == works
    for work in works:
        keys = {row["key"] for row in results["rows"] if row["data"] == work}
        assert {"ceiling", "gdsdata", "dataloader", "gdsdata_saving", "dataloader_torch_save"} <= keys


@pytest.mark.gpu
@pytest.mark.parametrize("key", ["gdsdata", "gdsdata_saving", "dataloader_torch_save"])
@pytest.mark.parametrize("work", WORKS)
def test_each_work_is_trained_on_a_gpu(sources, tmp_path, work, key):
    row = row_of(sources, tmp_path, key, work, device="cuda")
    row.verify(dtype_of(work), workers=1)
    found = run(row, every=3)
    assert found["steps"] == 6 and 0 < found["device_step_s"] < found["seconds"]
    assert len(found["stalls_s"]) == (0 if key == "gdsdata" else 2)


@pytest.mark.gpu
def test_steps_on_a_gpu_take_as_long_as_was_wanted(tmp_path):
    fields = {"case_work": ["volumes"], "case_rows": ["ceiling", "gdsdata"], "case_step_ms": 5.0, "case_steps": 40}
    # Steps with smaller batches take as long as the host needs to give the GPU their kernels.
    fields |= {"case_batch_size": 16, "data_shape": [64, 64, 64], "data_size_bytes": 64 * MIB}
    chosen = small(tmp_path, cases.TrainSettings, **fields)
    chosen.device.name = "cuda"
    assert bench_run.main(chosen, tmp_path) == 0
    ceiling = results_in(tmp_path)["rows"][0]
    assert 0.0047 < ceiling["device_step_s"]["median"] < 0.008


def test_a_picture_of_failed_rows_is_none(tmp_path):
    results = {"rows": [], "data": {}, "device": {"name": "cpu"}}
    TrainLayout(results).plot(tmp_path / "results.png")
    assert not (tmp_path / "results.png").exists()


def test_a_picture_has_all_of_its_title_beside_rows_of_long_names(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    times = {"median": 0.01, "min": 0.009, "max": 0.011}
    row = dict(key="gdsdata", name="a row of a long name " * 3, data="volumes", cache="warm", stall_s=None)
    row |= dict(device_step_s=times, wall_step_s=times, idle_share={"median": 0.1}, limit={"name": "not known"})
    about = {"volumes": {"repeats": 1.5, "batch_size": 16, "sample_bytes": 2**21}}
    TrainLayout({"rows": [row], "data": about, "device": {"name": "cuda"}}).plot(tmp_path / "results.png")
    edge = image.imread(tmp_path / "results.png")[:, -1]
    assert (edge == 1).all(), "the drawing ends before the edge of the picture"
