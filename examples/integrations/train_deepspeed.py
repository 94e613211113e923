"""Train with ZeRO of DeepSpeed, stop in the middle of an epoch, and resume with equal losses.

    python examples/integrations/train_deepspeed.py --stop-at 25   # a few seconds on 2 cores
    python examples/integrations/train_deepspeed.py                # resumes behind step 25
    torchrun --standalone --nproc-per-node 2 examples/integrations/train_deepspeed.py

The losses are the same as without the stop, digit for digit. Each of several processes trains on
its share. A small network learns which byte follows 16 others in the Python standard library.
tests/test_integration_examples.py runs this example.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import deepspeed
import torch
from torch import nn

import gdsdata
from gdsdata.integrations.deepspeed import use

FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))  # the data, as they are: 17 bytes at a time
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29631"}
BATCH = 512  # of each process
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in all, those before a restart included")
    parser.add_argument("--stop-at", type=int, help="save and stop after this step")
    parser.add_argument("--folder", type=Path, default=cache / "train_deepspeed", help="folder of the checkpoint")
    args = parser.parse_args()

    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    deepspeed.init_distributed()  # the data set asks torch.distributed for its share
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    use(engine)  # checkpoints are written and read by gdsdata
    dataset = gdsdata.GDSDataset(
        FILES,
        batch_size=BATCH,
        format=gdsdata.formats.Tokens("uint8", seq_len=16),
        seed=0,
        device=engine.device,
    )
    if (args.folder / "latest").exists():
        _, client_state = engine.load_checkpoint(str(args.folder))
        dataset.load_state_dict(client_state["dataset"])
    last = args.stop_at or args.steps
    while engine.global_steps < last:
        for batch in dataset:
            loss = nn.functional.cross_entropy(engine(batch[:, :-1].int()), batch[:, -1].long())
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"step {engine.global_steps}: loss {loss.item():.9g}", flush=True)
            if engine.global_steps == last:
                break
    engine.save_checkpoint(str(args.folder), client_state={"dataset": dataset.state_dict()})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
