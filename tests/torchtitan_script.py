"""Torchtitan's trainer, configured by examples/integrations/train_torchtitan.py.

    torchrun --standalone --nproc-per-node=2 tests/torchtitan_script.py FOLDER RUN DEVICE

RUN is whole, stopped, resumed or failing, and DEVICE is cpu or cuda. Each rank writes
FOLDER/RUN-rank-R.json.

The trainer wants a GPU. `on_cpu` replaces what asks for one: the kind of device, the statistics of
its memory, and a barrier with device numbers. The scaling within NCCL's reductions is replaced by
sums there. So runs on the CPU show neither copies from GPUs to pinned memory nor NCCL. On both
devices torch's plain attention takes the place of FlexAttention, which has no backward pass on the
CPU, and wants a compiler on a GPU.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "integrations"
STEPS, INTERVAL, STOP_AT = 12, 3, 8  # steps; the last checkpoint before the stop is of step 6
GLOBAL_BATCH, SEQ_LEN, BATCHES = 4, 64, 5  # so the stop is in the second epoch
sys.path.insert(0, str(EXAMPLES))  # where torchtitan finds the module train_torchtitan


def on_cpu():
    """Have torchtitan, which is not imported yet, run on the CPU."""
    with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
        from torchtitan.tools import utils
    assert utils.device_type == "cpu", "torchtitan was imported before"
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as of_groups

    class Memory:
        device_name = "CPU"

        def get_peak_stats(self):
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self):
            pass

    metrics.build_device_memory_monitor = Memory
    of_groups.set_pg_timeouts = lambda **_: None


def write_data(folder):
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (GLOBAL_BATCH * SEQ_LEN * BATCHES + 1,), dtype=torch.uint8)
    tokens.numpy().tofile(folder / "tokens.bin")


def configured(folder, place, *options):
    """Return the example's configuration, as the command line gives it to torchtitan."""
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = ConfigManager().parse_args(
        ["--module", "train_torchtitan", "--config", "debugmodel", "--dump-folder", str(place)]
        + ["--dataloader.dataset-path", f"{folder}/tokens.bin", "--checkpoint.interval", str(INTERVAL)]
        + ["--training.steps", str(STEPS), "--training.seq-len", str(SEQ_LEN), "--debug.seed", "1"]
        + ["--training.local-batch-size", str(GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]))]
        + list(options)
    )
    layers = config.model_spec.model.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.model.layers = layers
    config.activation_checkpoint = None
    config.debug.deterministic = True
    return config


def train(config, stop_at=None):
    """Return a trainer that was closed, and the loss of each step."""
    from torch.distributed.fsdp import FSDPModule

    trainer, losses = config.build(), {}
    if trainer.device.type == "cpu":
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.update({step: loss})
    if stop_at is not None:
        trainer.should_continue_training = lambda: trainer.step < stop_at
    with mock.patch("torchtitan.trainer.time", mock.Mock(wraps=time, sleep=mock.Mock())):
        trainer.train()  # it sleeps two seconds at its end
    trainer.close()
    return trainer, losses


def run(name, folder):
    """Return the losses of one run: without a stop, up to one, or from there on."""
    place = folder / ("whole" if name == "whole" else "stopped")
    return train(configured(folder, place), STOP_AT if name == "stopped" else None)[1]


def failing(folder):
    """Return this rank's error of a run in which rank 1 cannot write the checkpoint of step 6."""
    from gdsdata import GDSStorageWriter
    from gdsdata.errors import IoError

    write_items = GDSStorageWriter.write_items

    def refused(writer, name, items):
        if name.startswith("__1") and "step-6" in str(writer.path):
            raise IoError(28, "the disk is full", name)
        return write_items(writer, name, items)

    with mock.patch.object(GDSStorageWriter, "write_items", refused):
        try:
            return train(configured(folder, folder / "failing"))[1]
        except BaseException as error:  # as CheckpointException is
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    here, what, device = Path(sys.argv[1]), *sys.argv[2:4]
    if device == "cpu":
        on_cpu()
    found = failing(here) if what == "failing" else run(what, here)
    (here / f"{what}-rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
