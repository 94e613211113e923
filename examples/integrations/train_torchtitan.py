"""Train torchtitan's debug model with data and checkpoints of gdsdata, stop, and resume.

    cd examples/integrations
    torchrun --nproc-per-node=1 -m torchtitan.train --module train_torchtitan --config debugmodel \\
        --dump-folder /tmp/debugmodel --training.steps 40
    # The same again, with more steps, continues behind the last checkpoint.

Torchtitan takes the configuration from `debugmodel`, and every option of it on the command line
(``--checkpoint.interval 10``, ``--dataloader.shuffle lanes``). It needs a GPU for each process.
The tokens are the bytes of the Python standard library.

tests/test_torchtitan.py runs this configuration on the CPU.
"""

import sysconfig
from dataclasses import dataclass

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from gdsdata.integrations.torchtitan import GDSCheckpointManager
from gdsdata.integrations.torchtitan_data import GDSDataLoader


class Bytes(BaseTokenizer):
    """A token is a byte. Torchtitan wants a tokenizer, and the data need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_) -> None:
        super().__init__()

    def encode(self, text: str, **_) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


def debugmodel() -> Trainer.Config:
    config = llama3_debugmodel()
    config.tokenizer = Bytes.Config()
    config.dataloader = GDSDataLoader.Config(
        dataset_path=f"{sysconfig.get_paths()['stdlib']}/a*.py",  # or a URL: s3://bucket/tokens/*.bin
        dtype="uint8",
    )
    config.checkpoint = GDSCheckpointManager.Config(
        enable=True,
        interval=10,  # steps
        keep_latest_k=3,
        last_save_model_only=False,
    )
    config.training.seq_len = 512
    return config
