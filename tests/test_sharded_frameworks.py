"""Models that frameworks shard by FSDP2 go through the hooks, and training resumes in mid-epoch."""

import json

import integrations_script
import pytest
import quick_programs
import sharded_script as script
import torch
from helpers import torchrun

# The calls of a save and of a load by each rank. Models and optimizers are saved together or apart.
SAVES = {
    "lightning": [{"dcp.save": 1, "torch.save": 1}, {"dcp.save": 1}],
    "accelerate": [{"dcp.save": 2, "torch.save": 2}, {"dcp.save": 2, "torch.save": 1}],
}
LOADS = {
    "lightning": [{"dcp.load": 2, "torch.load": 1}] * 2,
    "accelerate": [{"dcp.load": 2, "torch.load": 2}] * 2,
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    return request.param


@pytest.fixture(scope="module")
def folder(device, tmp_path_factory):
    folder = tmp_path_factory.mktemp(device)
    integrations_script.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def of_two_ranks(device, folder):
    """Return what each of two processes saw: one launch for all frameworks."""
    for name in script.TRAINERS:
        pytest.importorskip(name, reason=f"{name} is not installed")
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    with quick_programs.importing(*script.TRAINERS, "torch._dynamo"):
        code, said = torchrun(2, script.__file__, folder, OMP_NUM_THREADS="1", TRAIN_ON=device, **hidden)
    assert code == 0, said
    return [json.loads((folder / f"sharded-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("framework", script.TRAINERS)
def test_two_ranks_resume_a_sharded_model_in_mid_epoch_with_the_same_losses(of_two_ranks, framework):
    ranks = [seen[framework] for seen in of_two_ranks]
    for runs in ranks:
        assert len(runs["stopped"]) == script.STOP_AFTER
        assert runs["stopped"] + runs["resumed"] == runs["whole"]
    first, second = ([numbers for numbers, _ in runs["whole"]] for runs in ranks)
    assert all(set(one).isdisjoint(other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("framework", script.TRAINERS)
def test_all_files_of_a_sharded_checkpoint_go_through_the_hooks(of_two_ranks, folder, framework):
    written_bytes = 0
    for rank, seen in enumerate(of_two_ranks):
        for calls, expected in (("saves", SAVES), ("loads", LOADS)):
            found = seen[framework][calls]
            assert {call: count for call, (count, _) in found["served"].items()} == expected[framework][rank]
            assert found["left"] == []
        written_bytes += sum(size for _, size in seen[framework]["saves"]["served"].values())
    files = [path for path in (folder / framework / "stopped").rglob("*") if path.is_file()]
    assert written_bytes == sum(path.stat().st_size for path in files if path.name != ".metadata")
