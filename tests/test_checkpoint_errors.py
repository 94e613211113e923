"""Mistakes with checkpoints, and files that are none, cause errors with path, place and remedy."""

import argparse
import collections
import contextlib
import gc
import gzip
import inspect
import json
import os
import pickle
import pydoc
import re
import sys
import threading
import types
import weakref
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import dcp_names_lost_metadata
from torch.distributed.checkpoint import CheckpointException

import gdsdata
import gdsdata.safetensors
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.checkpoint.torch_zip import archive_reader
from gdsdata.checkpoint.torch_zip.archive import open_archive
from gdsdata.checkpoint.torch_zip.archive_reader import unpickle_structure
from gdsdata.errors import CorruptData, IoError

UNPICKLABLE = (AttributeError, pickle.PicklingError)  # the first up to Python 3.13, the second later
STATE = {"a": torch.arange(3000.0), "nested": {"b": torch.ones(3)}}


class Unknown:
    """A class that weights_only does not allow."""


def written(path, content: bytes):
    path.write_bytes(content)
    return path


def zip_of(state, path):
    torch.save(state, path)
    return path.read_bytes()


# ---------------------------------------------------------------------------------------------- arguments of torch


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("map_location", "cuda", "write device=, as in device='cuda'"),
        ("map_location", torch.device("cpu"), "write device=, as in device='cpu'"),
        ("map_location", {"cuda:1": "cuda:0"}, "write device=, the device of all tensors; for a function or a dict, "),
        ("map_location", None, "leave it out, or write device= if tensors are not for the CPU"),
        ("mmap", True, "leave it out"),
        ("pickle_module", pickle, "leave it out, or call torch.load"),
    ],
)
def test_arguments_of_torch_load_are_refused_with_what_to_write(tmp_path, name, value, remedy):
    torch.save(STATE, tmp_path / "x.pt")
    said = rf"load\(\) got an unexpected keyword argument '{name}', which is one of torch.load: {re.escape(remedy)}"
    with pytest.raises(TypeError, match=said):
        gdsdata.load(tmp_path / "x.pt", **{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"only": 7}, 'only=7 must be a list of patterns, as only=["layers.0.*"]'),
        ({"only": [b"a"]}, "only=[b'a'] must be a list of patterns"),
        ({"verify": ""}, "verify='' must be True or False"),
        ({"verify": 2}, "verify=2 must be True or False"),
        ({"strict": "no"}, "strict='no' must be True or False"),
        ({"weights_only": None}, "weights_only=None must be True or False"),
        ({"weights_only": "False"}, "weights_only='False' must be True or False"),
    ],
)
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_arguments_of_load_of_another_type_are_refused_in_words(tmp_path, name, arguments, words):
    gdsdata.save({"a": torch.ones(3)}, tmp_path / name)
    with pytest.raises(TypeError) as error:
        gdsdata.load(tmp_path / name, **arguments)
    assert words in str(error.value)


def test_load_has_its_own_arguments_alone():
    names = set(inspect.signature(gdsdata.load).parameters)
    assert {"path", "device", "into"} < names and not names & {"map_location", "mmap", "kwargs", "arguments"}
    assert "map_location" not in pydoc.plain(pydoc.render_doc(gdsdata.load))
    with pytest.raises(TypeError, match="unexpected keyword argument 'devices'"):
        gdsdata.load("x.pt", devices="cpu")


# ------------------------------------------------------------------------------------------------ files


def legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def before_another_header(path):
    """Return a damaged zip, with a record's header where torch's probe for older files ends."""
    whole = zip_of(STATE, path)
    return b"PL\3\4" + whole[4:512] + b"PK\3\4" + whole[516:]


def zip_of_files(path, *names):
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "3")
    return path.read_bytes()


ANOTHER_ZIP = r"is a zip that torch.save did not write in this form: torch\.export\.load reads a .pt2"


BROKEN = {
    "empty": (lambda path: b"", r"is empty \(0 bytes\).*load an earlier checkpoint"),
    "cut": (lambda path: zip_of(STATE, path)[:9000], "cut short"),
    "cut-at-the-head": (lambda path: zip_of(STATE, path)[:40], "cut short"),
    "cut-to-two-bytes": (lambda path: b"PK", "cut short: it has no more than the first bytes"),
    "cut-to-three-bytes": (lambda path: b"PK\3", "cut short: it has no more than the first bytes"),
    "cut-legacy": (lambda path: legacy(STATE, path)[:-4000], "cut short or damaged"),
    "cut-legacy-at-the-head": (lambda path: legacy(STATE, path)[:30], "cut short or damaged"),
    "cut-legacy-in-a-name": (lambda path: legacy(STATE, path).partition(b"_tensor_v2")[0], "cut short or damaged"),
    "damaged-at-the-head": (lambda path: b"PL" + zip_of(STATE, path)[2:], r"begins with b'PL\\x03\\x04', as no file"),
    "damaged-in-the-magic": (
        lambda path: b"PK\3\5" + zip_of(STATE, path)[4:],
        r"begins with b'PK\\x03\\x05', as no file",
    ),
    "damaged-before-another-header": (
        before_another_header,
        r"begins with b'PL\\x03\\x04', as no file .* Fetch or save",
    ),
    "text": (lambda path: b"epoch,loss\n1,2.5\n", "is text, and begins with 'epoch,loss"),
    "html": (lambda path: b"<!DOCTYPE html><html><body>404</body></html>", "is an HTML .* Fetch the file again"),
    "git-lfs": (lambda path: b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a Git LFS pointer. Run"),
    "pickle": (lambda path: pickle.dumps({"w": np.ones(3)}), "is a pickle that torch.save did not write.* pickle.load"),
    "pickle-of-protocol-2": (lambda path: pickle.dumps(STATE, protocol=2), "is a pickle that torch.save did not write"),
    "zeros": (lambda path: bytes(9000), "begins with zeros, as a crash .* Fetch or save the file again"),
    "another-zip": (lambda path: zip_of_files(path, "model/archive_format", "model/.data/version"), ANOTHER_ZIP),
    "zip-without-version": (lambda path: zip_of_files(path, "model/data.pkl"), ANOTHER_ZIP),
    "zip-without-folder": (lambda path: zip_of_files(path, "data.pkl", "version"), ANOTHER_ZIP),
    "gzip": (lambda path: gzip.compress(bytes(9)), "compressed by gzip. Unpack it first"),
}


@pytest.mark.filterwarnings("ignore:.*is read by torch.load")
@pytest.mark.parametrize(
    "arguments", [{}, {"only": ["*"]}, {"into": {"a": torch.zeros(3000)}}, {"weights_only": False}]
)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_checkpoint_is_corrupt_with_its_path_and_a_remedy(tmp_path, kind, arguments):
    make, words = BROKEN[kind]
    path = written(tmp_path / "x.pt", make(tmp_path / "whole"))
    with pytest.raises(CorruptData, match=words) as caught:
        gdsdata.load(path, **arguments)
    assert str(path) in str(caught.value) and caught.value.path == str(path)


@pytest.mark.parametrize("kind", ["empty", "text", "html", "git-lfs", "gzip", "zeros"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json"])
def test_a_safetensors_name_with_something_else_behind_it_says_what_it_is(tmp_path, kind, name):
    make, words = BROKEN[kind]
    path = written(tmp_path / name, make(None))
    with pytest.raises(CorruptData, match=words) as caught:
        gdsdata.load(path)
    assert caught.value.path == str(path)


@pytest.mark.filterwarnings("ignore:.*is read by torch.load")
@pytest.mark.parametrize("save", [zip_of, legacy])
@pytest.mark.parametrize("arguments", [{}, {"only": ["*"]}])
def test_a_class_that_weights_only_refuses_is_named_with_the_argument_to_allow_it(tmp_path, save, arguments):
    path = tmp_path / "x.pt"
    save({"model": Unknown()}, path)
    words = r"has [\w.]+\.Unknown, which weights_only=True does not allow. .* gdsdata.load\(..., weights_only=False\)"
    with pytest.raises(pickle.UnpicklingError, match=words) as caught:
        gdsdata.load(path, **arguments)
    assert str(caught.value).startswith(f"'{path}' of ") and "\x1b" not in str(caught.value)


@pytest.mark.parametrize("is_imported", [True, False])
def test_a_class_of_a_package_that_is_not_imported_says_to_import_it(tmp_path, monkeypatch, is_imported):
    package = types.ModuleType("unimported_package")
    package.Unknown = type("Unknown", (), {"__module__": "unimported_package"})
    monkeypatch.setitem(sys.modules, "unimported_package", package)
    torch.save({"model": package.Unknown()}, tmp_path / "x.pt")
    if not is_imported:
        monkeypatch.delitem(sys.modules, "unimported_package")
    with pytest.raises(pickle.UnpicklingError, match="has unimported_package.Unknown, which weights_only") as caught:
        gdsdata.load(tmp_path / "x.pt")
    assert ("unimported_package is not imported here" in str(caught.value)) is not is_imported


def test_a_class_that_is_gone_is_an_attribute_error_with_the_path_and_a_remedy(tmp_path, monkeypatch):
    torch.save({"model": Unknown()}, tmp_path / "x.pt")
    monkeypatch.delitem(globals(), "Unknown")
    with pytest.raises(AttributeError, match=r"x.pt' of .*Unknown.*cannot be imported here: install it"):
        gdsdata.load(tmp_path / "x.pt", weights_only=False)


class Fails:
    def __setstate__(self, state):
        raise FileExistsError("the class's own")


def test_an_error_of_a_users_class_stays_what_it_is(tmp_path):
    fails = Fails()
    fails.has_a_state = True
    torch.save(fails, tmp_path / "x.pt")
    with pytest.raises(FileExistsError, match="the class's own"):
        gdsdata.load(tmp_path / "x.pt", weights_only=False)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_load_that_fails_in_a_class_keeps_no_memory(tmp_path, monkeypatch, weights_only):
    kept = []

    def unpickle(file, saved, storages, *others):
        kept.extend(map(weakref.ref, storages))
        return its(file, saved, storages, *others)

    its = archive_reader.unpickle_by_torch
    monkeypatch.setattr(archive_reader, "unpickle_by_torch", unpickle)
    fails = Fails()
    fails.has_a_state = True
    torch.save({"a": torch.ones(1000), "fails": fails}, tmp_path / "x.pt")
    with contextlib.suppress(FileExistsError, pickle.UnpicklingError):
        gdsdata.load(tmp_path / "x.pt", weights_only=weights_only)
    gc.collect()
    assert [one() for one in kept] == [None]


def test_no_memory_is_no_damage(tmp_path, monkeypatch):
    torch.save({"model": Unknown()}, tmp_path / "x.pt")

    def load(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(torch.OutOfMemoryError):
        gdsdata.load(tmp_path / "x.pt")


def test_an_option_out_of_range_is_no_damage(tmp_path):
    torch.save({"model": Unknown(), "a": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="workers") as caught:
        gdsdata.load(tmp_path / "x.pt", options=gdsdata.EngineOptions(workers=10**6), weights_only=True)
    assert not isinstance(caught.value, CorruptData)


# ------------------------------------------------------------------------------------------------ hooks


@pytest.mark.parametrize("kind", BROKEN)
def test_hooks_raise_torchs_own_errors_with_the_path_in_a_note(tmp_path, kind):
    path = written(tmp_path / "x.pt", BROKEN[kind][0](tmp_path / "whole"))
    with pytest.raises(Exception) as stock:
        torch.load(path)
    with gdsdata.torch_hooks(), pytest.raises(Exception) as hooked:
        torch.load(path)
    assert type(hooked.value) is type(stock.value) and str(hooked.value) == str(stock.value)
    if hasattr(hooked.value, "__notes__"):  # from Python 3.11 on
        assert str(path) in hooked.value.__notes__[-1]


def test_hooks_raise_what_weights_only_refuses_as_torch_does(tmp_path):
    torch.save({"model": Unknown()}, tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError) as stock:
        torch.load(tmp_path / "x.pt")
    with gdsdata.torch_hooks(), pytest.raises(pickle.UnpicklingError) as hooked:
        torch.load(tmp_path / "x.pt")
    assert str(hooked.value) == str(stock.value)


# ------------------------------------------------------------------------------------------------ DCP


def failed_dcp_load(folder, state):
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=gdsdata.GDSStorageReader(folder), no_dist=True)
    (error, _), *_ = caught.value.failures.values()
    return error


names_metadata = pytest.mark.skipif(not dcp_names_lost_metadata(), reason="this torch drops the error of the reader")


@names_metadata
def test_a_folder_without_dcp_metadata_says_that_its_save_did_not_complete(tmp_path):
    words = f"there is no file '{tmp_path / '.metadata'}', so no checkpoint in that folder: its save did not complete"
    with pytest.raises(FileNotFoundError, match=words):
        gdsdata.GDSStorageReader(tmp_path).read_metadata()
    assert words in str(failed_dcp_load(tmp_path, dict(STATE)))


@names_metadata
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"<html>"])
def test_damaged_dcp_metadata_is_corrupt_with_its_path(tmp_path, damage):
    dcp.save(dict(STATE), storage_writer=gdsdata.GDSStorageWriter(tmp_path), no_dist=True)
    path = written(tmp_path / ".metadata", damage((tmp_path / ".metadata").read_bytes()))
    with pytest.raises(CorruptData, match=f"'{path}' (is cut short or damaged|cannot be unpickled)") as caught:
        gdsdata.GDSStorageReader(tmp_path).read_metadata()
    assert caught.value.path == str(path) and "load an" in str(caught.value)
    said = str(failed_dcp_load(tmp_path, dict(STATE)))  # torch passes on the text alone
    assert said.endswith(str(caught.value)) and "there is no file" not in said


@names_metadata
def test_dcp_metadata_that_cannot_be_opened_is_the_last_error_of_a_load(tmp_path):
    (tmp_path / ".metadata").mkdir()
    assert str(failed_dcp_load(tmp_path, dict(STATE))).endswith(f"Is a directory: '{tmp_path / '.metadata'}'")


def test_a_missing_dcp_data_file_is_named_with_its_metadata_file(tmp_path):
    dcp.save(dict(STATE), storage_writer=gdsdata.GDSStorageWriter(tmp_path), no_dist=True)
    (tmp_path / "__0_0.distcp").unlink()
    error = failed_dcp_load(tmp_path, dict(STATE))
    assert isinstance(error, FileNotFoundError)
    assert re.search(r"__0_0.distcp', which '.metadata' names. The checkpoint is incomplete", str(error))


@pytest.mark.parametrize("content", [bytes, lambda size: bytes([0x80, 2]) + b"}" * (size - 2)])
def test_a_value_of_dcps_that_cannot_be_unpickled_names_itself_and_its_place(tmp_path, content):
    dcp.save({"step": {1, 2}, **STATE}, storage_writer=gdsdata.GDSStorageWriter(tmp_path), no_dist=True)
    stored = pickle.loads((tmp_path / ".metadata").read_bytes()).storage_data
    (place,) = [info for index, info in stored.items() if index.fqn == "step"]
    with open(tmp_path / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(content(place.length))
    error = failed_dcp_load(tmp_path, {"step": {1}, **STATE})
    assert f"step in '{tmp_path / place.relative_path}', {place.length} bytes from offset {place.offset}" in str(error)


# ------------------------------------------------------------------------------------------------ AsyncCheckpointer


@pytest.fixture
def checkpointer(tmp_path):
    with gdsdata.AsyncCheckpointer(tmp_path / "run") as made:
        yield made


def only_file_of(checkpointer, step):
    checkpointer.wait()
    (path,) = (path for path in os.scandir(f"{checkpointer._folder.path}/step-{step}") if path.name.endswith(".pt"))
    return path.path


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "gone", "other bytes"])
def test_a_damaged_file_of_a_step_is_an_error_with_its_path_and_a_remedy(checkpointer, damage):
    checkpointer.save(3, {"state": STATE})
    path = only_file_of(checkpointer, 3)
    with open(path, "rb") as file:
        data = file.read()
    damaged = {"empty": b"", "cut": data[:-100], "text": b"epoch", "other bytes": b"epoch loss\n" * len(data)}
    if damage == "gone":
        os.unlink(path)
    else:
        with open(path, "wb") as file:
            file.write(damaged[damage][: len(data)])
    expected = FileNotFoundError if damage == "gone" else CorruptData
    with pytest.raises(expected, match="Restore another step|is no checkpoint: it is text") as caught:
        checkpointer.restore({"state": {"a": torch.zeros(3000), "nested": {"b": torch.zeros(3)}}})
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("step", "state", "error", "words"),
    [
        (4, torch.nn.Linear(2, 2), TypeError, r"state is of type Linear: give a dict, .*\"model\": model"),
        (4, [torch.ones(1)], TypeError, "state is of type list: give a dict"),
        ("a", STATE, TypeError, "step='a' must be a whole number"),
        (4.0, STATE, TypeError, "step=4.0 must be a whole number"),
        (None, STATE, TypeError, "step=None must be a whole number"),
        (True, STATE, TypeError, "step=True must be a whole number"),
        (-1, STATE, ValueError, "step=-1 must be 0 or more"),
        (10**19, STATE, ValueError, "step=10000000000000000000 is more than 9{19}: give a smaller one"),
        (4, {"model": {"hook": lambda: 0}}, UNPICKLABLE, r"model\.hook, of type function, cannot be saved"),
        (4, {"lock": threading.Lock()}, TypeError, "lock, of type lock, cannot be saved: .* Leave it out"),
    ],
)
def test_a_save_of_what_cannot_be_saved_says_what_to_give(checkpointer, step, state, error, words):
    with pytest.raises(error, match=words):
        checkpointer.save(step, state)
    assert checkpointer.save(np.int64(5), {"state": STATE}).result().endswith("step-5")
    assert set(os.listdir(checkpointer._folder.path)) == {"lock", "step-5"}


@pytest.mark.parametrize("name", ["x.pt", "hook.pt"])
def test_a_lambda_in_a_saved_state_is_named_by_its_keys(tmp_path, name):
    state = {"model": [STATE, {"fn": lambda: 0}]}
    with gdsdata.torch_hooks(), pytest.raises(UNPICKLABLE, match=r"model\.1\.fn, of type f"):
        (torch.save if name == "hook.pt" else gdsdata.save)(state, tmp_path / name)
    with pytest.raises(UNPICKLABLE, match="lambda"):
        gdsdata.save(lambda: 0, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_restore_refuses_what_is_no_state_before_it_reads(checkpointer):
    checkpointer.save(3, {"state": STATE})
    for state in (torch.nn.Linear(2, 2), (1, 2), None):
        with pytest.raises(TypeError, match=f"state is of type {type(state).__name__}: give a dict"):
            checkpointer.restore(state)
    with pytest.raises(TypeError, match="step='newest' must be a whole number"):
        checkpointer.restore({"state": STATE}, step="newest")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 9; there are: 3"):
        checkpointer.restore({"state": STATE}, step=9)


def test_a_restore_from_the_folder_of_one_step_names_the_folder_above(checkpointer, monkeypatch):
    checkpointer.save(3, {"state": STATE}).result()
    run = checkpointer._folder.path
    monkeypatch.chdir(run)
    for folder in ("step-3", f"{run}/step-3/"):
        for step in (None, 3):
            with pytest.raises(ValueError, match=rf"AsyncCheckpointer\('{run}'\)\.restore\(state, step=3\)"):
                gdsdata.AsyncCheckpointer(folder).restore({"state": STATE}, step)
        with pytest.raises(IoError, match=rf"AsyncCheckpointer\('{run}'\)\.restore\(state, step=3\)"):
            gdsdata.load(folder)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.float64(1), r"numpy\.\w+\.multiarray\.scalar"),
        (Path("x"), r"pathlib.*Path"),
        (datetime(2024, 1, 1), r"datetime\.datetime"),
        (argparse.Namespace(a=1), r"argparse\.Namespace"),
    ],
    ids=["scalar", "path", "datetime", "namespace"],
)
def test_a_restore_of_what_weights_only_forbids_names_it_and_the_argument(checkpointer, value, name):
    checkpointer.save(3, {"state": {"value": value}})
    words = rf"rank-0-\w+.pt' has {name}, which .* call restore\(..., weights_only=False\)"
    with pytest.raises(pickle.UnpicklingError, match=words) as caught:
        checkpointer.restore({"state": {"value": None}})
    assert "\x1b" not in str(caught.value)
    target = {"value": None}
    assert checkpointer.restore({"state": target}, weights_only=False) == 3
    assert target["value"] == value


@pytest.mark.parametrize("name", ["model.pt", "model.pt/run"])
def test_a_file_in_the_place_of_the_checkpointers_folder_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    gdsdata.save(STATE, "model.pt")
    file = tmp_path / "model.pt"
    words = f"^folder='{tmp_path / name}' cannot be used, because '{file}' is a file: give the path of a folder$"
    with gdsdata.AsyncCheckpointer(name) as checkpointer:
        with pytest.raises(IoError, match=words):
            checkpointer.restore({"state": STATE})
        with pytest.raises(IoError, match=words):
            checkpointer.save(1, {"state": STATE}).result()


def test_a_model_of_other_shapes_or_names_is_a_value_error_of_restore(checkpointer):
    checkpointer.save(3, {"model": torch.nn.Linear(2, 2)})
    for model in (torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False)):
        with pytest.raises(ValueError, match=r"step 3 in '.*run' does not fit 'model': Error\(s\) in loading"):
            checkpointer.restore({"model": model})


def test_an_optimizer_of_other_parameters_or_groups_is_a_value_error_of_restore(checkpointer):
    weight, bias = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    checkpointer.save(3, {"optim": torch.optim.SGD([weight, bias])})
    for groups in ([weight], [{"params": [weight]}, {"params": [bias]}]):
        with pytest.raises(ValueError, match=r"step 3 in '.*run' does not fit 'optim': loaded .* frozen ones included"):
            checkpointer.restore({"optim": torch.optim.SGD(groups)})


def test_an_error_of_a_users_load_state_dict_comes_as_it_is(checkpointer):
    class Mine(torch.nn.Linear):
        def load_state_dict(self, state, *_, **__):
            raise RuntimeError("its own")

    checkpointer.save(3, {"model": Mine(2, 2)})
    with pytest.raises(RuntimeError, match=r"^its own$"):
        checkpointer.restore({"model": Mine(2, 2)})


def test_a_second_checkpointer_of_this_process_says_to_close_the_other_one(checkpointer):
    checkpointer.save(3, {"state": STATE}).result()
    with gdsdata.AsyncCheckpointer(checkpointer._folder.path) as second:
        handle = second.save(4, {"state": STATE})
        with pytest.raises(IoError, match=r"another AsyncCheckpointer of this process .*: close\(\) that one first"):
            handle.result()
    assert "failed: IoError(" in repr(handle)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"keep_last": 0}, ValueError, r"^keep_last=0 must be 1 or more"),
        ({"keep_every": 0}, ValueError, r"^keep_every=0 must be 1 or more"),
        ({"keep_last": 2.5}, TypeError, r"^keep_last=2.5 must be a whole number"),
        ({"keep_last": True}, TypeError, r"^keep_last=True must be a whole number"),
        ({"peers": True}, TypeError, r"^peers=True must be a whole number"),
        ({"folder": None}, TypeError, r"^folder=None is of type NoneType: give the path of a folder"),
        ({"folder": ""}, ValueError, r"^folder='' is empty: give the path of a folder \(the current one is '.'\)"),
        ({"memory_folder": 7}, TypeError, r"^memory_folder=7 is of type int: give the path of a folder"),
        ({"timeout_s": float("nan")}, ValueError, r"^timeout_s=nan must be a number of seconds, 0 or more"),
        ({"timeout_s": float("inf")}, ValueError, r"^timeout_s=inf must be a number of seconds, 0 or more"),
        ({"timeout_s": -1}, ValueError, r"^timeout_s=-1 must be a number of seconds, 0 or more"),
        ({"timeout_s": "60"}, TypeError, r"^timeout_s='60' is of type str: give a number of seconds"),
    ],
)
def test_an_argument_out_of_range_is_named_alone(tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        gdsdata.AsyncCheckpointer(**{"folder": tmp_path, **arguments})


@pytest.mark.parametrize("make", [gdsdata.GDSStorageWriter, gdsdata.GDSStorageReader])
def test_a_folder_of_dcp_of_another_type_is_refused_in_words(make):
    with pytest.raises(TypeError, match="^path=7 is of type int: give the path of a folder, or a URL"):
        make(7)
    with pytest.raises(TypeError, match="^path=None is of type NoneType: give the path of a folder, or a URL"):
        make(None)


def test_checkpointers_handles_and_engines_say_what_they_are(tmp_path):
    with gdsdata.AsyncCheckpointer(tmp_path, keep_every=10) as checkpointer:
        handle = checkpointer.save(7, {"state": STATE})
        handle.result()
        assert repr(handle) == "SaveHandle(step=7, 12012 bytes, complete)"
        assert repr(checkpointer).startswith(f"AsyncCheckpointer('{tmp_path}', keep_last=3, keep_every=10, rank 0 of 1")
    assert "closed" in repr(checkpointer)
    with gdsdata.Engine(most_calls=3) as engine:
        future = engine.write(tmp_path / "x", torch.ones(9))
        future.result()
        reading = engine.read(tmp_path / "x", torch.zeros(9))
        reading.result()
        assert repr(engine).startswith("Engine(open, devices: cpu, most_calls=3, EngineOptions(")
        assert repr(reading) == f"<Read of 36 bytes from offset 0 of '{tmp_path / 'x'}', finished>"
    assert repr(engine).startswith("Engine(closed")


# ------------------------------------------------------------------------------------------------ arguments of load


@pytest.mark.parametrize("call", [gdsdata.load, lambda path: gdsdata.save(STATE, path)])
@pytest.mark.parametrize("path", [["a.pt", "b.pt"], ("a.pt",), 7, None, torch.ones(1)])
def test_a_path_that_is_none_is_a_type_error_that_says_what_to_give(call, path):
    with pytest.raises(TypeError, match=r"and no path of one file: (call .* for each file|give a str)"):
        call(path)


def test_an_open_file_is_refused_with_what_takes_it(tmp_path):
    with open(tmp_path / "x.pt", "wb") as file, pytest.raises(TypeError, match=r"torch\.save takes file objects"):
        gdsdata.save(STATE, file)
    with open(tmp_path / "x.pt", "rb") as file, pytest.raises(TypeError, match=r"torch\.load takes file objects"):
        gdsdata.load(file)


def test_paths_as_bytes_are_taken(tmp_path):
    gdsdata.save(STATE, os.fsencode(tmp_path / "x.pt"))
    assert torch.equal(gdsdata.load(os.fsencode(tmp_path / "x.pt"))["a"], STATE["a"])


@pytest.mark.parametrize(
    "call",
    [
        lambda: gdsdata.save(STATE, "gcs://b/x.pt"),
        lambda: gdsdata.load("hf://a/x.pt"),
        lambda: gdsdata.safetensors.save_file({"a": torch.ones(3)}, "abfs://x/y.safetensors"),
        lambda: dcp.save({"a": torch.ones(3)}, storage_writer=gdsdata.GDSStorageWriter("s3a://x/y"), no_dist=True),
        lambda: gdsdata.GDSStorageReader("hdfs://x/y"),
        lambda: gdsdata.GDSDataset(["s3://b/c", "hf://a/x.bin"], 3, device="cpu"),
        lambda: gdsdata.read_tensor("r2://b/x", torch.uint8, (3,)),
        lambda: gdsdata.write_tensor(torch.ones(3), "r2://b/x"),
    ],
    ids=["save", "load", "save_file", "dcp.save", "dcp reader", "data set", "read_tensor", "write_tensor"],
)
def test_a_url_of_an_unknown_scheme_is_never_a_local_path(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^'\w+://.* has no scheme that gdsdata knows: give a path, or a URL of s3://"
    ):
        call()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", ["gcs://b/run", "S3://b/run", "s3://b/run"])
def test_a_url_is_no_folder_of_a_checkpointer(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^folder='{url}' is a URL: give a local folder, and upload='s3://b"):
        gdsdata.AsyncCheckpointer(url)
    with pytest.raises(ValueError, match=rf"^memory_folder='{url}' is a URL: give a local folder$"):
        gdsdata.AsyncCheckpointer("run", memory_folder=url)
    assert os.listdir(tmp_path) == []


def test_a_pattern_and_a_lost_folder_are_named(tmp_path, monkeypatch):
    gdsdata.save(STATE, tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match=r"\*.pt' is a pattern, which 1 files match. Give .* as '.*x.pt'"):
        gdsdata.load(tmp_path / "*.pt")
    with pytest.raises(FileNotFoundError, match=r"no file '.*y.pt', and no folder '.*lost'. Check the path"):
        gdsdata.load(tmp_path / "lost" / "y.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"no file 'y.pt'. .*relative paths begin at '{tmp_path}'"):
        gdsdata.load("y.pt")


def test_a_folder_is_refused_with_what_reads_it(tmp_path):
    def refused(words):
        with pytest.raises(IoError, match=words):
            gdsdata.load(tmp_path)

    refused("is nothing that looks like a checkpoint")
    gdsdata.save(STATE, tmp_path / "weights.pt")
    refused("is a folder. Give the path of a file in it, as '.*weights.pt'")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused("is a folder. Give the path of a file in it, as '.*index.json'")
    (tmp_path / "step-3").mkdir()
    refused(r"AsyncCheckpointer\(folder\).restore\(state\)")
    (tmp_path / ".metadata").touch()
    refused("GDSStorageReader")


@pytest.mark.parametrize("arguments", [{}, {"only": ["*"]}, {"into": {"a": torch.zeros(3000)}}])
def test_a_data_file_of_a_distributed_checkpoint_says_to_load_its_folder(tmp_path, arguments):
    dcp.save(STATE, storage_writer=gdsdata.GDSStorageWriter(tmp_path), no_dist=True)
    for name, what in (("__0_0.distcp", "a data file"), (".metadata", "the metadata")):
        path = tmp_path / name
        words = rf"'{path}' is {what} of a distributed checkpoint. Load its folder by .*Reader\('{tmp_path}'\)"
        with pytest.raises(CorruptData, match=words) as caught:
            gdsdata.load(path, **arguments)
        assert caught.value.path == str(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", [{}, {"only": ["*"]}])
def test_a_program_of_torchscript_says_what_loads_it(tmp_path, arguments):
    path = tmp_path / "x.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(RuntimeError, match=rf"^'{path}' .* program of TorchScript, .* torch\.jit\.load"):
        gdsdata.load(path, **arguments)
    assert gdsdata.load(path, weights_only=False)(torch.ones(1, 2)).shape == (1, 2)


def test_an_index_whose_object_was_replaced_meanwhile_says_so(tmp_path, monkeypatch):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))

    def read(*_):
        raise CorruptData("the object was replaced since it was indexed", str(index))

    monkeypatch.setattr(OpenFile, "read", read)
    with pytest.raises(CorruptData, match="^the object was replaced since it was indexed$"):
        gdsdata.load(index)


def test_an_index_of_pickled_shards_says_to_load_each_of_them(tmp_path):
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.bin", "b": "model-2.bin"}}))
    torch.save({"a": torch.ones(2)}, tmp_path / "model-1.bin")
    words = rf"'{index}' names pickled files, .* load each by itself, as gdsdata.load\('{tmp_path}/model-1.bin'\)"
    with pytest.raises(CorruptData, match=words):
        gdsdata.load(index)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("arguments", [{}, {"only": ["*"]}])
@pytest.mark.filterwarnings("ignore:.*is read by torch.load")
def test_an_npz_file_is_named_as_such(tmp_path, save, arguments):
    save(tmp_path / "q.npz", weights=np.ones(3))
    with pytest.raises(CorruptData, match=r"q.npz' .*is no checkpoint: it is an npz file .* numpy.load"):
        gdsdata.load(tmp_path / "q.npz", **arguments)


def test_a_missing_shard_is_named_with_its_index_and_what_it_has(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}))
    gdsdata.save({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    with pytest.raises(FileNotFoundError, match=rf"'{index}' names '2.safetensors' for 'b' and 1 more") as caught:
        gdsdata.load(index)
    assert caught.value.path == str(tmp_path / "2.safetensors")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_patterns_that_match_nothing_are_an_error_with_the_names_there_are(tmp_path, suffix):
    gdsdata.save({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / f"x.{suffix}")
    for arguments in ({}, {"into": {"a": torch.zeros(2)}}):
        with pytest.raises(ValueError, match=r"only=\['model.*'\] matches no name .*Give patterns of these: a, b"):
            gdsdata.load(tmp_path / f"x.{suffix}", only=["model.*"], **arguments)


def test_a_module_as_into_is_refused_with_what_to_pass(tmp_path):
    model = torch.nn.Linear(2, 2)
    gdsdata.save(model.state_dict(), tmp_path / "x.pt")
    with pytest.raises(TypeError, match=r"a module \(Linear\): pass its tensors, into=model.state_dict\(\)"):
        gdsdata.load(tmp_path / "x.pt", into=model)
    for into in ("model", 3, iter([])):
        with pytest.raises(TypeError, match="which has nothing to fill"):
            gdsdata.load(tmp_path / "x.pt", into=into)
    of_a_class = collections.defaultdict(list, {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    with pytest.raises(TypeError, match=r"is of type defaultdict, which has nothing to fill: pass dict\(into\)"):
        gdsdata.load(tmp_path / "x.pt", into=of_a_class)
    gdsdata.load(tmp_path / "x.pt", into=dict(of_a_class))
    assert torch.equal(of_a_class["weight"], model.weight)


# ------------------------------------------------------------------------------------------------ the meta device


def model_on_meta():
    with torch.device("meta"):
        return torch.nn.Linear(20, 30)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_state_on_meta_is_refused_and_assigning_fills_the_model(tmp_path, suffix):
    saved = torch.nn.Linear(20, 30)
    path = tmp_path / f"x.{suffix}"
    gdsdata.save(saved.state_dict(), path)
    model = model_on_meta()
    with pytest.raises(ValueError, match="^weight is on the meta device.*assign=True") as caught:
        gdsdata.load(path, into=model.state_dict())
    advice = re.search(r"model\.load_state_dict\(.*assign=True\)", str(caught.value))[0]
    eval(advice.replace("device=...", "device='cpu'"), {"gdsdata": gdsdata, "model": model})
    assert torch.equal(model.weight, saved.weight) and torch.equal(model.bias, saved.bias)
    assert isinstance(model.weight, torch.nn.Parameter) and not model.weight.is_meta


def test_a_state_with_one_tensor_on_meta_changes_nothing(tmp_path):
    gdsdata.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "x.pt")
    into = {"a": torch.zeros(3), "b": torch.zeros(3, device="meta")}
    with pytest.raises(ValueError, match="^b is on the meta device"):
        gdsdata.load(tmp_path / "x.pt", into=into)
    assert not into["a"].any()


def test_a_restore_into_a_model_on_meta_is_refused(checkpointer):
    checkpointer.save(3, {"model": torch.nn.Linear(20, 30)})
    with pytest.raises(ValueError, match=r"model\.weight is on the meta device.*to_empty"):
        checkpointer.restore({"model": model_on_meta()})


def test_a_tensor_on_meta_is_never_read_into(tmp_path):
    gdsdata.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    stored = unpickle_structure(open_archive(OpenFile(str(tmp_path / "x.pt"))))["a"]
    with pytest.raises(ValueError, match="^a is on the meta device"):
        TensorReader(gdsdata.EngineOptions(), verify=False).tensor_into(torch.zeros(3, device="meta"), stored, ("a",))


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_dcp_load_of_a_state_on_meta_fills_the_state_as_torch_does(tmp_path):
    saved = {"a": torch.randn(20, 30)}
    dcp.save(dict(saved), storage_writer=gdsdata.GDSStorageWriter(tmp_path), no_dist=True)
    for planner in (None, gdsdata.GDSLoadPlanner()):
        found = {"a": torch.zeros(20, 30, device="meta")}
        dcp.load(found, storage_reader=gdsdata.GDSStorageReader(tmp_path), planner=planner, no_dist=True)
        assert torch.equal(found["a"], saved["a"])


# ------------------------------------------------------------------------------------------------ single tensors


def test_tensors_are_written_and_read_by_the_engine_of_their_options(tmp_path):
    options = gdsdata.EngineOptions(workers=1, queue_depth=7, backend="posix")
    from gdsdata.io.engine import shared_engine

    counted = shared_engine(options, torch.device("cpu"))
    before = counted.statistics()["transfers"]
    gdsdata.write_tensor(STATE["a"], tmp_path / "x", options=options)
    written_by_it = counted.statistics()["transfers"]
    found = gdsdata.read_tensor(tmp_path / "x", torch.float32, (3000,), options=options)
    assert torch.equal(found, STATE["a"])
    assert before < written_by_it < counted.statistics()["transfers"]


def test_a_value_that_is_no_tensor_is_refused_with_its_type(tmp_path):
    with pytest.raises(TypeError, match="a value of type ndarray is no tensor to write: give a torch.Tensor"):
        gdsdata.write_tensor(np.ones(3), tmp_path / "x")
    with gdsdata.Engine() as engine:
        with pytest.raises(TypeError, match="a value of type ndarray is no tensor to read into"):
            engine.read(tmp_path / "x", np.ones(3))
        with pytest.raises(TypeError, match="a value of type list is no tensor to write"):
            engine.write(tmp_path / "x", [1.0])
