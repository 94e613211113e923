"""The cost of importing gdsdata, and the names that it finds."""

import pytest
import torch
from helpers import run_script

import gdsdata

# One new interpreter imports torch (2.5 s of CPU time), and forks to use each name.
STARTED = """
import os, sys, traceback
import torch, gdsdata

print([name for name in sys.modules if name.startswith("gdsdata.")], flush=True)
for name, others in eval(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    try:
        getattr(gdsdata, name)
        print(name, sorted(others & sys.modules.keys()), flush=True)
    except BaseException:
        traceback.print_exc()
    os._exit(0)
"""


def test_an_import_and_a_use_load_no_more_modules_than_they_need():
    unneeded = [
        ("GDSDataset", {"gdsdata.checkpoint", "gdsdata.data.mix"}),
        ("save", {"gdsdata.data.dataset", "torch.distributed.checkpoint"}),
    ]
    assert run_script(STARTED, unneeded) == (0, "[]\nGDSDataset []\nsave []\n", "")


PLACED = """
import pathlib, resource, time
import torch, gdsdata

def place():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("FDSize"))

wanted = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
gdsdata.GDSDataset
until = time.monotonic() + 10
while place() < wanted and time.monotonic() < until:
    time.sleep(0.001)
print(place() >= wanted)
"""


def test_an_import_has_place_made_for_descriptors():
    assert run_script(PLACED) == (0, "True\n", "")


# As above: each load is the first one of its process.
LOADED = """
import os, sys, traceback
import torch, gdsdata

for path, others in eval(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    try:
        gdsdata.load(path)
        print(sorted(others & sys.modules.keys()), flush=True)
    except BaseException:
        traceback.print_exc()
    os._exit(0)
"""


def test_a_load_imports_what_its_format_needs(tmp_path):
    names = ("a.safetensors", "a.pt")
    for name in names:
        gdsdata.save({"a": torch.arange(5.0)}, tmp_path / name)
    of_saves = {"gdsdata.checkpoint.torch_zip.archive_writer", "gdsdata.checkpoint.file_writer"}
    of_others = {"gdsdata.checkpoint.torch_zip.archive_reader"}, {"gdsdata.checkpoint.safetensors_file"}
    unneeded = of_saves | {"gdsdata.observe.times", "torch.utils.serialization.config"}
    loads = [(str(tmp_path / name), unneeded | others) for name, others in zip(names, of_others, strict=True)]
    assert run_script(LOADED, loads) == (0, "[]\n[]\n", "")


FIRST_BATCH = """
import sys
import torch, gdsdata

records, reading = gdsdata.formats.Records("u1", (1000,)), gdsdata.Reading(gdsdata.EngineOptions(direct="always"))
data = gdsdata.GDSDataset(sys.argv[1], 4, records, shuffle="lanes", device="cpu", reading=reading)
for batch in data:
    break
print(batch.shape[0], data.stats()["shuffle"].partition("(")[0], "numpy.ma" in sys.modules)
"""


def test_the_first_batch_of_lanes_imports_no_masked_arrays(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(400 * 1000))
    assert run_script(FIRST_BATCH, path) == (0, "4 Lanes False\n", "")


def test_every_public_name_is_found_and_listed():
    for name in gdsdata.__all__:
        assert getattr(gdsdata, name) is not None
    assert set(gdsdata.__all__) <= set(dir(gdsdata))
    with pytest.raises(AttributeError, match="has no attribute 'GDSNothing'"):
        gdsdata.GDSNothing  # noqa: B018
