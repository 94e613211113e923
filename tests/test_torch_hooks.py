"""With `torch_hooks`, torch's own calls have the same results, and gdsdata moves their bytes."""

import collections
import contextlib
import fractions
import gc
import hashlib
import inspect
import io
import os
import pickle
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import interrupted_at_call, run_script
from safetensors import torch as stock_safetensors
from test_checkpoint import DEVICES, assert_same, awkward, trained
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.serialization import config

import gdsdata
from gdsdata.checkpoint import hooks
from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter
from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.io import engine

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def by_torch(monkeypatch) -> list[str]:
    """Record the calls that are left to torch."""
    calls = []
    its = COUNTS.left
    monkeypatch.setattr(COUNTS, "left", lambda call, *about: (calls.append(call), its(call, *about)))
    return calls


def states():
    state = awkward()
    del state["storage"]  # two storages are never equal
    return [trained(), state, torch.arange(5), [1, "x"], None]


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_saves_and_loads_of_torch_are_the_same_with_and_without_hooks(tmp_path, by_torch, device):
    for state in states():
        torch.save(state, tmp_path / "torchs.pt")
        with gdsdata.torch_hooks():
            torch.save(state, tmp_path / "ours.pt")
            found = [torch.load(tmp_path / name, device, weights_only=False) for name in ("ours.pt", "torchs.pt")]
        expected = torch.load(tmp_path / "torchs.pt", device, weights_only=False)
        for one in (*found, torch.load(tmp_path / "ours.pt", device, weights_only=False)):
            assert_same(one, expected, device or "cpu")
    assert "torch.save" not in by_torch


def replaced() -> list[object]:
    """Return what stands in every place that hooks replace."""
    places = [place[:2] for place in hooks._replacements()]
    assert len(places) == 12
    return [vars(owner)[name] for owner, name in places]


def test_hooks_are_there_within_and_gone_behind_whatever_happens():
    before = replaced()
    with pytest.raises(KeyError), gdsdata.torch_hooks():
        assert hooks.are_installed() and all(its is not own for its, own in zip(replaced(), before, strict=True))
        with gdsdata.torch_hooks():
            pass
        assert hooks.are_installed() and replaced() != before
        raise KeyError
    assert replaced() == before and not hooks.are_installed()


def test_ctrl_c_at_any_call_of_the_hooks_leaves_torch_as_it_was():
    before, number = replaced(), 1
    while interrupted_at_call(number, gdsdata.torch_hooks, hooks):
        gc.collect()  # a block whose end was interrupted ends here
        assert replaced() == before and not hooks.are_installed(), f"call {number}"
        number += 1
    assert number > 30


@pytest.mark.parametrize("interrupted", [1, 2])  # while names are replaced, or while they are restored
def test_ctrl_c_while_names_are_replaced_leaves_those_of_safetensors(monkeypatch, interrupted):
    before, calls, find_names = dict(vars(stock_safetensors)), [], engine.find_names

    def find(*arguments):
        found = find_names(*arguments)
        calls.append(found)
        if len(calls) == interrupted:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(engine, "find_names", find)
    with pytest.raises(KeyboardInterrupt), gdsdata.torch_hooks(safetensors=True):
        pass
    assert vars(stock_safetensors) == before and not hooks.are_installed()


def test_a_load_that_torch_does_not_allow_is_not_allowed_with_hooks(tmp_path):
    torch.save({"a": torch.ones(3), "f": os.getcwd}, tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt", weights_only=False)["f"] is os.getcwd


@pytest.mark.filterwarnings("ignore:Detected pickle protocol|pickle_load_args only works")
def test_calls_that_gdsdata_would_serve_differently_are_left_to_torch(tmp_path, by_torch):
    state, path = {"a": torch.arange(1000.0)}, tmp_path / "x.pt"
    torch.save(state, path)
    (tmp_path / "link.pt").symlink_to("x.pt")
    with gdsdata.torch_hooks():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        torch.save(state, tmp_path / "link.pt")
        torch.save(state, path, _use_new_zipfile_serialization=False)
        legacy = torch.load(path)
        torch.save(state, tmp_path / "4.pt", pickle_protocol=4)
        torch.save(state, path, _disable_byteorder_record=True)
        assert by_torch == ["torch.save"] * 3 + ["torch.load"] + ["torch.save"] * 2
        assert (tmp_path / "link.pt").is_symlink()
        found = [
            torch.load(io.BytesIO(buffer.getvalue())), torch.load(path, mmap=True),
            torch.load(path, encoding="latin1"),
        ]  # fmt: skip
        assert by_torch[6:] == ["torch.load"] * 3
        for one in (legacy, *found):
            assert_same(one, state)
        with torch.serialization.skip_data():
            torch.load(path)
        with torch._subclasses.FakeTensorMode():
            assert isinstance(torch.load(path)["a"], torch._subclasses.FakeTensor)
        assert by_torch[9:] == ["torch.load"] * 2
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises((RuntimeError, OSError)) as of_torch:
            torch.load(path)
        assert type(of_torch.value) in (RuntimeError, OSError), "its own error, not gdsdata's"
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "absent.pt")


def test_locations_are_mapped_as_torch_maps_them(tmp_path, by_torch):
    state = {"a": torch.arange(3)}
    torch.save(state, tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cuda:0": "cpu"}, {}):
            assert_same(torch.load(tmp_path / "x.pt", map_location=location), state)
        assert by_torch == []
        assert torch.load(tmp_path / "x.pt", map_location="meta")["a"].is_meta
        assert by_torch == ["torch.load"]


def test_dcp_by_a_checkpoint_id_alone(tmp_path, monkeypatch):
    written = []
    finish = GDSStorageWriter.finish
    monkeypatch.setattr(GDSStorageWriter, "finish", lambda self, **k: (written.append(self.path), finish(self, **k))[1])
    state = {"a": torch.arange(100), "b": 5}
    with gdsdata.torch_hooks():
        dcp.save(state, checkpoint_id=str(tmp_path / "x"))
        found = {"a": torch.zeros(100, dtype=torch.int64), "b": 0}
        dcp.load(found, checkpoint_id=str(tmp_path / "x"))
        assert_same(found, state)
    dcp.save(state, checkpoint_id=str(tmp_path / "y"))
    assert list(map(str, written)) == [str(tmp_path / "x")]


def test_threads_that_come_and_go_leave_torch_as_it_was(tmp_path):
    before = replaced()

    def use() -> None:
        for i in range(20):
            with gdsdata.torch_hooks():
                torch.save(i, tmp_path / f"{threading.get_ident()}.pt")

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replaced() == before


def test_installed_hooks_stay(tmp_path):
    script = """
import sys, torch, gdsdata
installed = gdsdata.install_torch_hooks()
with gdsdata.torch_hooks():
    pass
torch.save({"a": torch.ones(3)}, sys.argv[1])
assert torch.load(sys.argv[1])["a"].sum() == 3
assert installed.report().served["torch.load"].calls == 1
"""
    assert run_script(script, tmp_path / "x.pt")[0] == 0


@pytest.fixture
def configured() -> Iterator[Callable[[str, object], None]]:
    """Return a function that sets one of torch's switches for files."""
    with contextlib.ExitStack() as switches:
        yield lambda name, value: switches.enter_context(config.patch({name: value}))


def records_of(path) -> dict[str, tuple[int, int, bytes]]:
    """Return {record's name: (CRC-32 of the directory, begin of the content, content)}.

    The archive's own name is removed from the names.
    """
    content, found = path.read_bytes(), {}
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            name_bytes, extra_bytes = struct.unpack_from("<2H", content, record.header_offset + 26)
            begin = record.header_offset + 30 + name_bytes + extra_bytes
            name = record.filename.partition("/")[2]
            found[name] = record.CRC, begin, content[begin : begin + record.file_size]
    return found


@pytest.mark.parametrize("compute_crc32", [True, False])
@pytest.mark.parametrize("to_file", [True, False])
def test_checksums_are_computed_or_not_as_torch_is_configured(tmp_path, by_torch, configured, compute_crc32, to_file):
    configured("save.compute_crc32", compute_crc32)
    state = {"a": torch.arange(5000), "b": torch.arange(3), "empty": torch.empty(0)}
    torch.save(state, tmp_path / "torchs.pt")
    with gdsdata.torch_hooks():
        if to_file:
            torch.save(state, tmp_path / "hooks.pt")
        else:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            (tmp_path / "hooks.pt").write_bytes(buffer.getvalue())
        assert_same(torch.load(tmp_path / "hooks.pt"), state)
    assert by_torch == ([] if to_file else ["torch.save"])
    ours, torchs = (records_of(tmp_path / name) for name in ("hooks.pt", "torchs.pt"))
    same = [name for name in torchs if name.startswith("data") or name in ("byteorder", "version")]
    assert len(same) == 6
    assert all((ours[name][0], ours[name][2]) == (torchs[name][0], torchs[name][2]) for name in same)
    assert all((crc32 != 0) == (compute_crc32 and content != b"") for crc32, _, content in ours.values())
    with zipfile.ZipFile(tmp_path / "hooks.pt") as archive:
        assert (archive.testzip() is None) == compute_crc32, "zip tools accept computed checksums alone"
    assert_same(torch.load(tmp_path / "hooks.pt"), state)


def test_files_without_checksums_say_so_when_they_are_to_be_verified(tmp_path, configured):
    configured("save.compute_crc32", False)
    gdsdata.save({"a": torch.arange(5000)}, tmp_path / "without.pt")
    with pytest.warns(RuntimeWarning, match=r"without.pt' has no checksums"):
        gdsdata.load(tmp_path / "without.pt", verify=True)


@pytest.mark.parametrize("alignment", [1, 64, 512, 4096, 16384])
def test_records_are_aligned_as_torch_is_configured(tmp_path, by_torch, configured, alignment):
    configured("save.storage_alignment", alignment)
    state = {"a": torch.arange(5000), "b": torch.arange(3), "c": torch.arange(7)}
    with gdsdata.torch_hooks():
        torch.save(state, tmp_path / "x.pt")
    assert by_torch == (["torch.save"] if alignment > 4096 else [])
    storages = [begin for name, (_, begin, _) in records_of(tmp_path / "x.pt").items() if name.startswith("data/")]
    assert len(storages) == 3 and all(begin % alignment == 0 for begin in storages)
    assert_same(torch.load(tmp_path / "x.pt", mmap=True), state)


def test_files_are_mapped_where_torch_maps_them_by_default(tmp_path, by_torch, configured):
    torch.save({"a": torch.arange(3)}, tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        configured("load.mmap", True)
        torch.load(tmp_path / "x.pt")
        assert by_torch == ["torch.load"]
        torch.load(tmp_path / "x.pt", mmap=False)
        assert by_torch == ["torch.load"]


@pytest.mark.parametrize("order", [None, *torch.serialization.LoadEndianness])
@pytest.mark.parametrize("said", [None, b"little", b"big"])
def test_bytes_are_swapped_as_torch_swaps_them(tmp_path, configured, order, said):
    state, path = {"a": torch.arange(1000), "b": torch.arange(5, dtype=torch.int16)}, tmp_path / "x.pt"
    torch.save(state, tmp_path / "said.pt")
    with zipfile.ZipFile(tmp_path / "said.pt") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            if not name.endswith("byteorder"):
                target.writestr(name, source.read(name))
            elif said:
                target.writestr(name, said)
    configured("load.endianness", order)
    expected = torch.load(path)
    is_big = (said or (b"big" if order is torch.serialization.LoadEndianness.BIG else b"little")) == b"big"
    assert expected["b"][1] == (256 if is_big else 1)
    with gdsdata.torch_hooks():
        assert_same(torch.load(path), expected)
    assert_same(gdsdata.load(path), expected)
    assert_same(gdsdata.load(path, only=["a"]), {"a": expected["a"]})
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert_same(gdsdata.load(path, into=into), expected)


def test_data_is_skipped_where_torch_skips_it(tmp_path, by_torch):
    state = {"a": torch.ones(1000)}
    with gdsdata.torch_hooks(), torch.serialization.skip_data():
        torch.save(state, tmp_path / "x.pt")
    assert by_torch == ["torch.save"]
    assert torch.load(tmp_path / "x.pt")["a"].count_nonzero() == 0


def test_a_load_that_the_environment_forbids_is_refused(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3), "f": fractions.Fraction(1, 3)}, tmp_path / "x.pt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with gdsdata.torch_hooks(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.pt", weights_only=False)
    with pytest.raises(pickle.UnpicklingError):
        gdsdata.load(tmp_path / "x.pt", weights_only=False)
    with torch.serialization.safe_globals([fractions.Fraction]):
        assert gdsdata.load(tmp_path / "x.pt", weights_only=False)["f"] == fractions.Fraction(1, 3)


class Packed:
    """Keeps a tensor as a file of torch.save in memory, as some quantized weights do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self):
        torch.save(self.tensor, packed := io.BytesIO())
        return packed.getvalue()

    def __setstate__(self, packed):
        self.tensor = torch.load(io.BytesIO(packed))


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("environment", [None, "TORCH_FORCE_WEIGHTS_ONLY_LOAD"])
def test_an_object_that_loads_a_file_of_its_own_gets_its_values(tmp_path, monkeypatch, weights_only, environment):
    if environment:
        monkeypatch.setenv(environment, "1")
    torch.save({"packed": Packed(torch.arange(1000)), "plain": torch.ones(3)}, tmp_path / "x.pt")
    with torch.serialization.safe_globals([Packed]), gdsdata.torch_hooks() as hooked:
        for location in (None, lambda storage, location: storage):
            found = torch.load(tmp_path / "x.pt", map_location=location, weights_only=weights_only)
            assert torch.equal(found["packed"].tensor, torch.arange(1000))
            assert torch.equal(found["plain"], torch.ones(3))
        found = gdsdata.load(tmp_path / "x.pt", weights_only=weights_only)
        assert torch.equal(found["packed"].tensor, torch.arange(1000))
    assert hooked.report().served["torch.load"].calls == 2


def outcome(call) -> object:
    """Return a call's result, or its error's type and text."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "location", ["cpu:0", torch.device("cpu:0"), "nowhere", {"cpu": torch.device("cpu")}, {"cpu": "cpu:0"}, b"cpu", 5]
)
def test_locations_that_torch_does_not_know_end_in_its_errors(tmp_path, location):
    torch.save({"a": torch.arange(3)}, tmp_path / "x.pt")
    expected = outcome(lambda: torch.load(tmp_path / "x.pt", map_location=location))
    with gdsdata.torch_hooks():
        assert outcome(lambda: torch.load(tmp_path / "x.pt", map_location=location)) == expected
    assert expected[0] in (RuntimeError, TypeError, AttributeError)


@pytest.mark.parametrize("path", ["new.pt/", "none/../new.pt", "none/new.pt", "folder/", "folder/new.pt/"])
def test_a_path_that_torch_does_not_write_to_is_refused_in_its_words(tmp_path, monkeypatch, path):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = outcome(lambda: torch.save([1], path))
    with gdsdata.torch_hooks():
        assert outcome(lambda: torch.save([1], path)) == expected
    assert expected[0] is RuntimeError and os.listdir() == ["folder"] and not os.listdir("folder")


REFUSED_BY_TORCH: dict[str, Callable[[], object]] = {
    "memory in two dtypes": lambda: [(base := torch.zeros(8)), base.view(torch.int32)],
    "an imaginary part": lambda: [(base := torch.zeros(8, dtype=torch.complex64)), base.imag],
    "a storage in two dtypes": lambda: [(base := torch.zeros(8)).storage(), base.view(torch.int32)],
    "a tensor of zeros without memory": lambda: torch._efficientzerotensor((4, 5)),
    "a lambda": lambda: lambda: None,
    "a lambda in a list that contains itself": lambda: [(own := []).append(own), own, lambda: None],
}


@pytest.mark.parametrize("kind", REFUSED_BY_TORCH)
def test_a_state_that_torch_refuses_is_refused_in_its_words_and_the_file_stays(tmp_path, kind):
    state = REFUSED_BY_TORCH[kind]()
    with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError)) as expected:
        torch.save(state, io.BytesIO())
    torch.save(torch.ones(3), tmp_path / "x.pt")
    with gdsdata.torch_hooks(), pytest.raises(type(expected.value)) as refused:
        torch.save(state, tmp_path / "x.pt")
    assert str(expected.value) in str(refused.value)
    assert [one.name for one in tmp_path.iterdir()] == ["x.pt"]
    assert torch.equal(torch.load(tmp_path / "x.pt"), torch.ones(3))


def test_a_tensor_beyond_its_storage_ends_in_torchs_error(tmp_path):
    torch.save(torch.arange(4), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as source, zipfile.ZipFile(tmp_path / "y.pt", "w") as target:
        for name in source.namelist():
            longer = source.read(name).replace(b"K\x04\x85", b"K\x05\x85")  # its shape, in the pickle
            target.writestr(name, longer if name.endswith("data.pkl") else source.read(name))
    expected = outcome(lambda: torch.load(tmp_path / "y.pt"))
    with gdsdata.torch_hooks():
        assert outcome(lambda: torch.load(tmp_path / "y.pt")) == expected
    assert expected[0] is RuntimeError


@pytest.mark.skipif(
    ".safetensors" not in inspect.unwrap(torch.load).__code__.co_consts, reason="to this torch it is a name like others"
)
def test_safetensors_files_are_torchs_to_read(tmp_path, by_torch):
    torch.save({"a": torch.arange(3)}, tmp_path / "x.safetensors")  # torch decides by the name alone
    expected = outcome(lambda: torch.load(tmp_path / "x.safetensors"))
    with gdsdata.torch_hooks():
        assert outcome(lambda: torch.load(tmp_path / "x.safetensors")) == expected
    assert by_torch == [], "torch.load calls safetensors before anything that hooks replace"


def hub_files(folder) -> dict[str, str]:
    """Return URLs of files that torch.hub may find there, with the hash in their names."""
    state = trained()["model"]
    torch.save(state, folder / "torchs.pth")
    with gdsdata.torch_hooks():
        torch.save(state, folder / "hooks.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(2, 2), folder / "module.pth")
    torch.save(collections.OrderedDict(a=TwoTensor(torch.ones(2), torch.ones(2))), folder / "wrapper.pth")
    with zipfile.ZipFile(folder / "zipped.pth", "w") as archive:
        archive.write(folder / "old.pth", "inner.pth")
    (folder / "cut.pth").write_bytes((folder / "hooks.pth").read_bytes()[:-100])
    (folder / "empty.pth").touch()
    (folder / "page.pth").write_text("<html>404</html>")
    urls = {"absent": (folder / "absent.pth").as_uri()}
    for path in folder.glob("*.pth"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        urls[path.stem] = path.rename(folder / f"{path.stem}-{digest[:8]}.pth").as_uri()
    wrong = folder / "wrong-0123abcd.pth"
    torch.save(state, wrong)
    return urls | {"wrong": wrong.as_uri()}


@pytest.mark.filterwarnings("ignore:Falling back to the old format")
@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"map_location": "cpu"}, {"map_location": lambda storage, location: storage}, {"map_location": "meta"},
        {"weights_only": True}, {"check_hash": True}, {"progress": False}, {"file_name": "other.pth"},
    ],
)  # fmt: skip
def test_torch_hub_gives_the_same_with_and_without(tmp_path, capsys, arguments):
    (tmp_path / "there").mkdir()
    for name, url in hub_files(tmp_path / "there").items():

        def load(folder: str, url=url) -> tuple[object, ...]:
            folder = tmp_path / folder / url.rpartition("/")[2]
            found = outcome(lambda: torch.hub.load_state_dict_from_url(url, model_dir=str(folder), **arguments))
            if not isinstance(found, tuple):
                buffer = io.BytesIO()
                torch.save(found, buffer)
                found = records_in(buffer.getvalue())
            said, progress = capsys.readouterr()
            there = sorted(path.name for path in folder.iterdir())
            return found, said.replace(str(folder), ""), bool(progress), there

        without = load("without")
        with gdsdata.torch_hooks():
            assert load("with") == without, name
            assert load("with")[0] == without[0], f"{name}, from the folder"


def records_in(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if "serialization_id" not in name}


@pytest.mark.gpu
def test_tensors_go_back_to_the_gpu_that_they_came_from(tmp_path, by_torch):
    state = {"a": torch.arange(5, device="cuda"), "b": torch.arange(5)}
    with gdsdata.torch_hooks():
        torch.save(state, tmp_path / "x.pt")
        found = torch.load(tmp_path / "x.pt")
        assert {name: tensor.device for name, tensor in found.items()} == {n: t.device for n, t in state.items()}
        assert torch.load(tmp_path / "x.pt", map_location={"cuda:0": "cpu"})["a"].device.type == "cpu"
    assert by_torch == []
