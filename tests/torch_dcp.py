"""Run torch's own tests of torch.distributed.checkpoint with gdsdata's classes.

    python tests/torch_dcp.py FOLDER/test_file_system_checkpoint_cpu.py ...  # or a folder

The tests are in torch's repository, under test/distributed/checkpoint. Take those of the installed
torch; they need the package expecttest. Prints which tests passed, failed and were skipped, and
why.
"""

import sys

import pytest
import torch.distributed.checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from gdsdata import GDSStorageReader, GDSStorageWriter


class Writer(GDSStorageWriter):
    """A writer with torch's arguments. It ignores those that say how torch works."""

    def __init__(
        self,
        path,
        single_file_per_rank=True,
        sync_files=True,
        thread_count=1,
        per_thread_copy_ahead=0,
        cache_staged_state_dict=False,
        overwrite=True,
        _extensions=None,
        serialization_format=SerializationFormat.TORCH_SAVE,
    ):
        if _extensions or serialization_format != SerializationFormat.TORCH_SAVE:
            raise NotImplementedError("GDSStorageWriter has neither extensions nor the safetensors format")
        super().__init__(path, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)


class Reader(GDSStorageReader):
    def __init__(self, path, _extension_registry=None):
        if _extension_registry is not None:
            raise NotImplementedError("GDSStorageReader has no extensions")
        super().__init__(path)


def put_in_place() -> None:
    """Replace the classes in every module that has imported them, before the tests run."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.checkpoint"):
            for stock, ours in ((FileSystemWriter, Writer), (FileSystemReader, Reader)):
                if getattr(module, stock.__name__, None) is stock:
                    setattr(module, stock.__name__, ours)
    assert torch.distributed.checkpoint.FileSystemWriter is Writer


put_in_place()  # at import: the processes that the tests start import this file first

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    quiet = ["-c", "/dev/null", "-p", "no:cacheprovider", "--tb=line", "--show-capture=no", "-q", "-rpfEs"]
    sys.exit(pytest.main([*quiet, *sys.argv[1:]]))
