"""A save keeps the existing file's mode, owner and links, or says why it cannot replace it."""

import errno
import os
import stat
import subprocess
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import in_new_process

import gdsdata
from gdsdata import EngineOptions
from gdsdata.checkpoint.background.file_saves import FileSaves
from gdsdata.checkpoint.deferred import deferring
from gdsdata.errors import IoError, NotReplaceable
from gdsdata.io import engine

NAMES = ["x.pt", "x.safetensors", "x.bin"]


def save(path: Path, value: float) -> None:
    tensor = torch.full((1000,), float(value))
    gdsdata.write_tensor(tensor, path) if path.name.endswith(".bin") else gdsdata.save({"a": tensor}, path)


def save_by_torch(path: Path, value: float) -> None:
    torch.save({"a": torch.full((1000,), float(value))}, path)


def value_in(path: Path) -> float:
    if path.name.endswith(".bin"):
        return gdsdata.read_tensor(path, torch.float32, (1000,))[-1].item()
    return gdsdata.load(path, verify=True)["a"][-1].item()


@pytest.fixture
def mounted(tmp_path):
    """Mount a single file, as container runtimes do."""
    path, source = tmp_path / "x.pt", tmp_path / "source"
    save_by_torch(path, 0)
    save_by_torch(source, 0)
    if os.geteuid() != 0 or subprocess.run(["mount", "--bind", source, path], capture_output=True).returncode != 0:
        pytest.skip("mounting takes root, and a container that permits it")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_mounted_file_is_written_by_torch_under_hooks_with_one_warning(mounted):
    with gdsdata.torch_hooks(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for value in (1, 2):
            save_by_torch(mounted, value)
            assert torch.load(mounted)["a"][0] == value
    (message,) = (str(one.message) for one in warned if "mount point" in str(one.message))
    assert f"could not replace '{mounted}': it is a mount point" in message
    assert message.endswith("torch.save writes over it in place instead, and a crash meanwhile damages it")
    assert value_in(mounted.parent / "source") == 2


def test_a_mounted_file_is_refused_before_a_byte_is_written(mounted):
    for write in (lambda: save(mounted, 1), lambda: gdsdata.write_tensor(torch.zeros(10_000), mounted)):
        with pytest.raises(NotReplaceable, match="it is a mount point.* mount its folder instead"):
            write()
    assert value_in(mounted) == 0 and {path.name for path in mounted.parent.iterdir()} == {"x.pt", "source"}


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_background_save_over_a_file_that_cannot_be_replaced_is_left_to_its_package(tmp_path, monkeypatch, name):
    path = tmp_path / name
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    own = engine.Output

    def refuse(given, *arguments):
        if str(given) == str(path):
            raise NotReplaceable(errno.EBUSY, f"could not replace '{path}'", str(path))
        return own(given, *arguments)

    monkeypatch.setattr(engine, "Output", refuse)
    saves = FileSaves(str(tmp_path), 1 << 20, EngineOptions())
    tensors = {"a": torch.full((1000,), 3.0)}
    with gdsdata.torch_hooks(safetensors=True) as hooks, deferring(saves, str(tmp_path)):
        with pytest.warns(RuntimeWarning, match="in place instead|safetensors writes it instead"):
            torch.save(tensors, path) if name == "x.pt" else safetensors.torch.save_file(tensors, path)
        torch.save(tensors, tmp_path / "other.pt")
    saves.raise_unseen()
    saves.close()
    assert value_in(path) == value_in(tmp_path / "other.pt") == 3
    assert hooks.report().served["torch.save"].calls == 1
    (left,) = hooks.report().left_to_torch
    assert left.call in ("torch.save", "safetensors.save_file") and left.reason == "no new file can replace it"


def open_the_way_to(folder: Path) -> None:
    """Let other users enter the folder. pytest makes its folders for its own user alone."""
    for parent in folder.parents:
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)


def saves_in_a_folder_that_takes_no_file(folder: Path) -> tuple[Exception, list[str]]:
    open_the_way_to(folder)
    path = folder / "x.pt"
    save_by_torch(path, 0)
    path.chmod(0o666)
    folder.chmod(0o555)
    with gdsdata.torch_hooks():  # imports modules that another user may not read
        torch.load(path)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with warnings.catch_warnings(record=True) as warned, gdsdata.torch_hooks():
        warnings.simplefilter("always")
        for value in (1, 2):
            save_by_torch(path, value)
            assert torch.load(path)["a"][0] == value
    try:
        save(path, 3)
    except Exception as error:
        return error, [str(one.message) for one in warned if "in place" in str(one.message)]
    finally:
        assert torch.load(path)["a"][0] == 2 and os.listdir(folder) == ["x.pt"]
    raise AssertionError("it was saved")


def test_a_writable_file_in_a_folder_that_takes_no_new_one(tmp_path):
    error, warned = in_new_process(saves_in_a_folder_that_takes_no_file, tmp_path)
    assert isinstance(error, NotReplaceable) and isinstance(error, IoError)
    assert "its folder takes no new file: save to another folder" in str(error)
    assert len(warned) == 1 and str(error) in warned[0]


def save_over_a_file_that_is_not_writable(folder: Path) -> str:
    open_the_way_to(folder)
    folder.chmod(0o777)
    save_by_torch(folder / "x.pt", 0)
    (folder / "x.pt").chmod(0o444)
    with gdsdata.torch_hooks():
        torch.load(folder / "x.pt")
    if os.geteuid() == 0:
        os.seteuid(65534)
    with gdsdata.torch_hooks(), pytest.raises(RuntimeError) as error:
        save_by_torch(folder / "x.pt", 1)
    assert torch.load(folder / "x.pt")["a"][0] == 0
    return str(error.value)


def test_hooks_refuse_a_file_that_is_not_writable_as_torch_does(tmp_path):
    said = in_new_process(save_over_a_file_that_is_not_writable, tmp_path)
    assert "Permission denied" in said or "cannot be opened" in said  # by torch 2.9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [226, 227, 248, 255])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path, name, size):
    path = tmp_path / name.rjust(size, "y")
    for value in (1, 2):
        save(path, value)
        assert value_in(path) == value
    with gdsdata.torch_hooks():
        save_by_torch(path.with_suffix(".pt"), 3)
        assert value_in(path.with_suffix(".pt")) == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o777, 0o2664])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, name, mode):
    path = tmp_path / name
    save(path, 1)
    path.chmod(mode)
    inode = path.stat().st_ino
    save(path, 2)
    assert value_in(path) == 2 and stat.S_IMODE(path.stat().st_mode) == mode and path.stat().st_ino != inode


def test_a_file_that_is_replaced_keeps_its_owner(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("giving a file away takes root")
    path = tmp_path / "x.pt"
    save(path, 1)
    os.chown(path, 1234, 4321)
    path.chmod(0o4640)
    save(path, 2)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o4640)


def test_the_temporary_file_for_a_private_file_is_private_from_the_start(tmp_path):
    path = tmp_path / "x"
    path.touch(0o600)
    output = engine.Output(str(path), 5)
    (temporary,) = tmp_path.glob("x.*.tmp")
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    del output
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_there", [True, False])
def test_links_are_followed_as_torch_follows_them(tmp_path, name, is_there):
    folder = tmp_path / "folder"
    folder.mkdir()
    if is_there:
        save(folder / name, 0)
    (folder / "near").symlink_to(name)
    link = tmp_path / f"link-{name}"
    link.symlink_to("folder/near")
    save(link, 1)
    assert os.readlink(link) == "folder/near" and os.readlink(folder / "near") == name
    assert value_in(folder / name) == 1 and not (folder / name).is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"folder", link.name}
    assert {path.name for path in folder.iterdir()} == {name, "near"}


def test_a_circle_of_links_is_an_error(tmp_path):
    (tmp_path / "x.pt").symlink_to("y.pt")
    (tmp_path / "y.pt").symlink_to("x.pt")
    with pytest.raises(IoError, match="follow the links of '.*x.pt'.*: Too many levels of symbolic links"):
        save(tmp_path / "x.pt", 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_parent_folder_is_an_error_with_the_final_name(tmp_path, name):
    path = tmp_path / "absent" / name
    with pytest.raises(FileNotFoundError) as error:
        save(path, 1)
    assert f"could not save '{path}': Parent directory {tmp_path}/absent does not exist" in str(error.value)
    assert ".tmp" not in str(error.value)


def test_a_missing_parent_folder_is_torchs_error_under_hooks(tmp_path):
    with pytest.raises(RuntimeError) as of_torch:
        save_by_torch(tmp_path / "absent" / "x.pt", 1)
    with gdsdata.torch_hooks(), pytest.raises(RuntimeError) as of_hooks:
        save_by_torch(tmp_path / "absent" / "x.pt", 1)
    assert type(of_hooks.value) is type(of_torch.value) and str(of_hooks.value) == str(of_torch.value)
    assert f"Parent directory {tmp_path}/absent does not exist" in str(of_hooks.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_is_refused_and_not_replaced(tmp_path, name):
    os.mkfifo(tmp_path / name)
    reader = os.open(tmp_path / name, os.O_RDWR)
    with pytest.raises(ValueError, match="is not a regular file"):
        save(tmp_path / name, 1)
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode) and os.listdir(tmp_path) == [name]
