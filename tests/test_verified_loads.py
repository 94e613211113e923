"""With verify=True, a load compares the checksum of every byte that it returns."""

import collections
import functools
import json
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from object_server import serving
from test_checkpoint import bits
from test_dcp import failure_of, on_ranks
from test_read_once import error_of
from torch.distributed.checkpoint.planner import LoadItemType

import gdsdata
from gdsdata import AsyncCheckpointer, GDSStorageReader, GDSStorageWriter
from gdsdata.checkpoint import record_checksums, tensor_reader
from gdsdata.errors import CorruptData
from gdsdata.io import engine


def views_of(base):
    """Return views of parts of one storage, whose rows, gaps and overlaps differ."""
    grid = base.reshape(60, 100)
    return {
        "begin": base[:1000],
        "row": grid[40],
        "every.second": base[1::2],
        "columns": grid[:, 30:60],
        "turned": grid[10:20].t(),
        "one": base[777],
        "expanded": base[5:6].expand(6000),  # as many bytes as the storage has
        "nothing": base[:0],
    }


VIEWS = tuple(views_of(torch.zeros(6000)))
WITH_BYTES = VIEWS[:-1]


@pytest.fixture
def path(tmp_path):
    """A file whose tensors are all views of parts of one storage."""
    torch.save(views_of(torch.arange(6000.0)), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def damage(path, place):
    """Change one byte of the first storage: of the element at ``place``."""
    content = bytearray(path.read_bytes())
    content[content.index(bits(torch.arange(6000.0))) + 4 * place + 2] ^= 1
    path.write_bytes(content)


def place_in(name):
    """Return an element of a view, as a place in the storage."""
    return int(views_of(torch.arange(6000.0))[name].reshape(-1)[-1])


def into_like(name, **how):
    return {name: torch.zeros_like(views_of(torch.arange(6000.0))[name].contiguous(), **how)}


LOADS = {
    "only": lambda path, name: gdsdata.load(path, only=[name], verify=True)[name],
    "dtype": lambda path, name: gdsdata.load(path, only=[name], dtype=torch.float64, verify=True)[name],
    "into": lambda path, name: gdsdata.load(path, into=into_like(name), strict=False, verify=True)[name],
    "into-strided": lambda path, name: gdsdata.load(
        path, into={name: torch.zeros(*into_like(name)[name].shape, 2)[..., 1]}, strict=False, verify=True,
    )[name],
    "into-cast": lambda path, name: gdsdata.load(
        path, into=into_like(name, dtype=torch.float64), strict=False, dtype=torch.float64, verify=True,
    )[name],
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("load", LOADS)
def test_parts_of_storages_have_their_values(path, load, name):
    found, expected = LOADS[load](path, name), views_of(torch.arange(6000.0))[name]
    assert torch.equal(found.double(), expected.double()) and found.shape == expected.shape


@pytest.mark.parametrize("name", WITH_BYTES)
@pytest.mark.parametrize("load", LOADS)
def test_a_damaged_part_of_a_storage_is_an_error(path, load, name):
    damage(path, place_in(name))
    with pytest.raises(CorruptData, match=rf"{name} in .*x.pt', 24000 bytes .* has the checksum .* was changed since"):
        LOADS[load](path, name)


def test_a_record_of_many_parts_is_read_once(path):
    before = tensor_reader.engine.shared_engine(gdsdata.EngineOptions(), torch.device("cpu")).statistics()
    found = gdsdata.load(path, only=["row", "columns", "one", "begin"], verify=True)
    after = tensor_reader.engine.shared_engine(gdsdata.EngineOptions(), torch.device("cpu")).statistics()
    assert torch.equal(found["columns"], torch.arange(6000.0).reshape(60, 100)[:, 30:60])
    assert sum(after["bytes"].values()) - sum(before["bytes"].values()) == 24000


def test_parts_of_a_tensor_that_is_loaded_too_are_not_read_again(tmp_path):
    base = torch.arange(6000.0)
    torch.save({"part": base[10:20], "whole": base, "turned": base.reshape(60, 100)[:, 5:9].t()}, tmp_path / "x.pt")
    into = {"part": torch.zeros(10), "whole": torch.zeros(6007)[7:], "turned": torch.zeros(4, 60)}
    counted = engine.shared_engine(gdsdata.EngineOptions(), torch.device("cpu"))
    before = sum(counted.statistics()["bytes"].values())
    gdsdata.load(tmp_path / "x.pt", into=into, verify=True)
    assert sum(counted.statistics()["bytes"].values()) - before == 24000
    assert torch.equal(into["part"], base[10:20]) and torch.equal(into["whole"], base)
    assert torch.equal(into["turned"], base.reshape(60, 100)[:, 5:9].t())


class Counts:
    """The bytes that a load reads, compares and has beside those of its tensors.

    Read are those of the engine's statistics.
    """

    def __init__(self, monkeypatch):
        self.read = self.compared = self.own = 0
        self._engine = engine.shared_engine(gdsdata.EngineOptions(), torch.device("cpu"))
        compare, new_storage = tensor_reader.compare, tensor_reader.new_storage

        def counted_compare(extents, checksums):
            self.compared += sum(extents.sizes_bytes)
            compare(extents, checksums)

        def counted_storage(size_bytes, device):
            self.own += size_bytes
            return new_storage(size_bytes, device)

        monkeypatch.setattr(tensor_reader, "compare", counted_compare)
        monkeypatch.setattr(tensor_reader, "new_storage", counted_storage)

    def __enter__(self):
        self.read = -sum(self._engine.statistics()["bytes"].values())
        return self

    def __exit__(self, *_):
        self.read += sum(self._engine.statistics()["bytes"].values())


@pytest.fixture
def rows(tmp_path):
    """A file of 60 rows of one storage, in no order. No tensor has the storage's head and tail."""
    base = torch.arange(7000.0)
    views = {str(i): base[500 + 100 * i : 600 + 100 * i] for i in random.Random(7).sample(range(60), 60)}
    torch.save(views, tmp_path / "rows.pt")
    return tmp_path / "rows.pt"


def row(i):
    return torch.arange(500.0 + 100 * i, 600.0 + 100 * i)


LOADS_OF_ROWS = {
    "only": lambda path: gdsdata.load(path, only=["*"], verify=True),
    "dtype": lambda path: gdsdata.load(path, dtype=torch.float64, verify=True),
    "into": lambda path: gdsdata.load(path, into={str(i): torch.zeros(100) for i in range(60)}, verify=True),
    "into-cast": lambda path: gdsdata.load(
        path, into={str(i): torch.zeros(100).double() for i in range(60)}, dtype=torch.float64, verify=True
    ),
}


@pytest.mark.parametrize("load", LOADS_OF_ROWS)
def test_many_parts_of_a_record_are_read_in_place_and_compared_once(rows, monkeypatch, load):
    with Counts(monkeypatch) as counts:
        found = LOADS_OF_ROWS[load](rows)
    assert all(torch.equal(found[str(i)].float(), row(i)) for i in range(60))
    assert (counts.read, counts.compared) == (28000, 28000)
    if load != "into-cast":  # a cast needs the bytes as they are in the file
        assert counts.own == 4000, "only what no tensor has"


@pytest.mark.parametrize("load", LOADS_OF_ROWS)
@pytest.mark.parametrize("place", [0, 499, 500, 3333, 6499, 6500, 6999])
def test_damage_within_or_between_the_parts_of_a_record_is_an_error(rows, load, place):
    content = bytearray(rows.read_bytes())
    content[content.index(bits(torch.arange(7000.0))) + 4 * place + 2] ^= 1
    rows.write_bytes(content)
    with pytest.raises(CorruptData, match=r"[0-9]+ in .*rows.pt', 28000 bytes .* has the checksum"):
        LOADS_OF_ROWS[load](rows)


def test_parts_that_overlap_or_have_gaps_are_copied_and_the_others_read_in_place(tmp_path, monkeypatch):
    base = torch.arange(6000.0)
    saved = {
        "apart": base[:1000],
        "first": base[2000:3000],
        "second": base[2500:3500],
        "within": base[2600:2610],
        "every.second": base[4000:5000:2],
        "between": base[4501:4502],
        "end": base[5000:],
    }
    torch.save(saved, tmp_path / "x.pt")
    into = {name: torch.zeros(len(tensor)) for name, tensor in saved.items()}
    in_place, add = [], tensor_reader.Extents.add

    def noted(extents, name, *rest):
        in_place.append(name)
        add(extents, name, *rest)

    monkeypatch.setattr(tensor_reader.Extents, "add", noted)
    with Counts(monkeypatch) as counts:
        gdsdata.load(tmp_path / "x.pt", into=into, verify=True)
    assert all(torch.equal(into[name], tensor) for name, tensor in saved.items())
    assert (counts.read, counts.compared) == (24000, 24000)
    assert [name for (name,) in in_place][::2] == ["apart", "end"]


def test_a_record_that_several_tensors_are_filled_with_is_read_once(tmp_path, monkeypatch):
    base = torch.arange(6000.0)
    torch.save({"a": base, "b": base, "turned": base.reshape(60, 100), "part": base[5:9]}, tmp_path / "x.pt")
    tied = torch.zeros(6000)
    into = {"a": tied, "b": tied, "turned": torch.zeros(60, 100), "part": torch.zeros(4)}
    with Counts(monkeypatch) as counts:
        gdsdata.load(tmp_path / "x.pt", into=into, verify=True)
    assert torch.equal(tied, base) and torch.equal(into["turned"], base.reshape(60, 100))
    assert torch.equal(into["part"], base[5:9])
    assert (counts.read, counts.compared, counts.own) == (24000, 24000, 0)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_tensors_with_records_of_their_own_are_read_and_compared_once(tmp_path, monkeypatch, ending):
    saved = {str(i): row(i) for i in range(60)}
    gdsdata.save(saved, tmp_path / f"x.{ending}")
    into = {name: torch.zeros(100) for name in saved}
    for how in ({}, {"only": ["*"]}, {"dtype": torch.float64}, {"into": into}):
        with Counts(monkeypatch) as counts:
            found = gdsdata.load(tmp_path / f"x.{ending}", verify=True, **how)
        assert all(torch.equal(found[name].float(), tensor) for name, tensor in saved.items())
        assert (counts.read, counts.compared, counts.own) == (24000, 24000, 0)


def note_rounds(monkeypatch, most_bytes):
    """Bound the own memory of a round. Return a list that grows by the bytes each round reads."""
    sizes, read_collected = [], tensor_reader.TensorReader._read_collected

    def noted(reader):
        sizes.append(sum(sum(one.sizes_bytes) for one in reader._collected.values()))
        read_collected(reader)

    monkeypatch.setattr(record_checksums, "MOST_OWN_BYTES", most_bytes)
    monkeypatch.setattr(tensor_reader.TensorReader, "_read_collected", noted)
    return sizes


def test_parts_are_read_in_rounds_of_bounded_memory(tmp_path, monkeypatch):
    bases = [torch.arange(6000.0) + 6000 * i for i in range(5)]
    torch.save({f"{i}.{part}": base[part::3] for part in range(3) for i, base in enumerate(bases)}, tmp_path / "x.pt")
    sizes = note_rounds(monkeypatch, most_bytes=50_000)
    into = {f"{i}.{part}": torch.zeros(2000) for part in range(3) for i in range(5)}
    gdsdata.load(tmp_path / "x.pt", into=into, verify=True)
    assert sizes == [48_000, 48_000, 24_000], "each record is read once"
    for i, base in enumerate(bases):
        assert all(torch.equal(into[f"{i}.{part}"], base[part::3]) for part in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_BYTES)
def test_parts_go_to_a_gpu_when_their_record_is_compared(path, name):
    expected = views_of(torch.arange(6000.0))[name]
    assert torch.equal(gdsdata.load(path, "cuda", only=[name], verify=True)[name].cpu(), expected)
    into = {name: torch.zeros(*expected.shape, 2, device="cuda")[..., 1]}
    gdsdata.load(path, into=into, strict=False, verify=True)
    assert torch.equal(into[name].cpu(), expected)
    damage(path, place_in(name))
    with pytest.raises(CorruptData, match="has the checksum"):
        gdsdata.load(path, "cuda", only=[name], verify=True)


@pytest.mark.parametrize("name", WITH_BYTES)
def test_parts_of_objects_are_compared(path, monkeypatch, name):
    with serving(monkeypatch) as server:
        server.put_folder(path.parent)
        found = gdsdata.load(server.url("x.pt"), only=[name], verify=True)
        assert torch.equal(found[name], views_of(torch.arange(6000.0))[name])
        damage(path, place_in(name))
        server.put_folder(path.parent)
        with pytest.raises(CorruptData, match=f"{name} in 's3://bucket/x.pt', 24000 bytes .* has the checksum"):
            gdsdata.load(server.url("x.pt"), only=[name], verify=True)


def test_a_part_without_a_checksum_is_warned_of(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(views_of(torch.arange(6000.0)), tmp_path / "part_without_crc.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(RuntimeWarning, match="'part_without_crc.pt' has no checksums"):
        assert gdsdata.load(tmp_path / "part_without_crc.pt", only=["one"], verify=True)["one"] == 777


@pytest.mark.filterwarnings("ignore:.*is read by torch.load", "ignore:Validating sparse tensor")
@pytest.mark.parametrize("kind", ["legacy", "sparse"])
def test_a_file_of_torch_alone_without_checksums_is_warned_of(tmp_path, kind):
    state = {"a": torch.ones(3), "s": torch.eye(3).to_sparse() if kind == "sparse" else 0}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / f"{kind}_without_crc.pt", _use_new_zipfile_serialization=kind != "legacy")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(RuntimeWarning, match=f"'{kind}_without_crc.pt' has no checksums"):
        assert gdsdata.load(tmp_path / f"{kind}_without_crc.pt", only=["a"], verify=True)["a"].sum() == 3


@pytest.mark.parametrize("name", WITH_BYTES)
def test_a_restore_compares_parts_of_storages(tmp_path, name):
    with AsyncCheckpointer(tmp_path / "run") as checkpointer:
        folder = Path(checkpointer.save(1, views_of(torch.arange(6000.0))).result())
    state = {name: torch.zeros_like(view).clone() for name, view in views_of(torch.zeros(6000)).items()}
    assert AsyncCheckpointer(tmp_path / "run").restore({name: state[name]}, verify=True) == 1
    assert torch.equal(state[name], views_of(torch.arange(6000.0))[name])
    (file,) = folder.glob("*.pt")
    damage(file, place_in(name))
    with pytest.raises(CorruptData, match=f"{name} in .* has the checksum"):
        AsyncCheckpointer(tmp_path / "run").restore({name: state[name]}, verify=True)


def _part_of_dcp(folder, verify):
    """Load columns 30 to 60 of what was saved as one tensor."""
    target = torch.zeros(60, 30)

    class Columns(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            index = dcp.metadata.MetadataIndex("w", torch.Size((0, 0)), 0)
            begins, sizes = torch.Size((0, 30)), torch.Size((60, 30))
            return dcp.LoadPlan([dcp.ReadItem(LoadItemType.TENSOR, index, begins, index, begins, sizes)])

        def resolve_tensor(self, _):
            return target

        def commit_tensor(self, *_):
            pass

    reader = GDSStorageReader(folder, verify=verify)
    dcp.load({"w": target}, storage_reader=reader, planner=Columns(), no_dist=True)
    return target


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", [GDSStorageWriter, dcp.FileSystemWriter])
def test_a_distributed_checkpoint_compares_parts_of_tensors(tmp_path, writer):
    whole = torch.arange(6000.0).reshape(60, 100)
    dcp.save({"w": whole}, storage_writer=writer(tmp_path), no_dist=True)
    assert torch.equal(_part_of_dcp(tmp_path, verify=True), whole[:, 30:60])
    damage(tmp_path / "__0_0.distcp", 5)  # of another column
    assert torch.equal(_part_of_dcp(tmp_path, verify=False), whole[:, 30:60])
    error = failure_of(functools.partial(_part_of_dcp, tmp_path, verify=True))
    assert isinstance(error, CorruptData) and "w in" in str(error) and "has the checksum" in str(error)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", [GDSStorageWriter, dcp.FileSystemWriter])
def test_parts_of_one_tensor_of_a_distributed_checkpoint_are_read_in_place(tmp_path, monkeypatch, writer):
    dcp.save({"w": torch.arange(6000.0).reshape(60, 100)}, storage_writer=writer(tmp_path), no_dist=True)
    parts = [torch.zeros(5, 100) for _ in range(12)]

    class Rows(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            index, sizes = dcp.metadata.MetadataIndex("w", torch.Size((0, 0)), 0), torch.Size((5, 100))
            return dcp.LoadPlan(
                [
                    dcp.ReadItem(LoadItemType.TENSOR, index, torch.Size((i, 0)), index, torch.Size((i, 0)), sizes)
                    for i in range(55, -1, -5)
                ]
            )

        def resolve_tensor(self, item):
            return parts[item.storage_offsets[0] // 5]

        def commit_tensor(self, *_):
            pass

    with Counts(monkeypatch) as counts:
        reader = GDSStorageReader(tmp_path, verify=True)
        dcp.load({"w": torch.zeros(60, 100)}, storage_reader=reader, planner=Rows(), no_dist=True)
    assert torch.equal(torch.cat(parts), torch.arange(6000.0).reshape(60, 100))
    assert (counts.read, counts.compared, counts.own) == (24000, 24000, 0)


def _ranks_load_parts(rank, folder):
    names = [WITH_BYTES[rank], WITH_BYTES[rank + 2], "one"]
    found = gdsdata.load(folder / "x.pt", only=names, verify=True, group="auto")
    into = {name: torch.zeros(*view.shape, 2)[..., 1] for name, view in views_of(torch.zeros(6000)).items()}
    gdsdata.load(folder / "x.pt", into=into, only=names[:2], strict=False, verify=True, group="auto")
    dist.barrier()
    if rank == 0:
        damage(folder / "x.pt", place_in(names[0]))
    dist.barrier()
    errors = [
        error_of(lambda: gdsdata.load(folder / "x.pt", only=names, verify=True, group="auto")),
        error_of(lambda: gdsdata.load(folder / "x.pt", into=into, strict=False, verify=True, group="auto")),
    ]
    return {name: found[name].tolist() for name in names}, {name: into[name].tolist() for name in names[:2]}, errors


def test_ranks_compare_records_of_which_each_wants_other_parts(path):
    expected = views_of(torch.arange(6000.0))
    for found, into, errors in on_ranks(3, _ranks_load_parts, path.parent):
        for name, values in [*found.items(), *into.items()]:
            assert values == expected[name].tolist()
        assert [error and error[0] for error in errors] == ["CorruptData"] * 2
        assert all("x.pt', 24000 bytes" in error[1] and "has the checksum" in error[1] for error in errors)


# ------------------------------------------------------------------------------------------------ damage anywhere


SMALL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(24.0)[3:20:2], "c": torch.ones(2, 2).half()}


def damaged(content, draw):
    """Yield files with another byte, without their end, or with more bytes behind it."""
    for i in range(draw.randrange(5), len(content), 5):
        yield content[:i] + bytes([content[i] ^ draw.randrange(1, 256)]) + content[i + 1 :]
    for end in range(1, len(content), 23):
        yield content[:end]
    for more in (b"\0", b"x" * 100, content):
        yield content + more


@pytest.mark.filterwarnings("ignore:.*is read by torch.load")
@pytest.mark.parametrize("load", ["new", "only", "into"])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_file_that_is_damaged_anywhere_gives_the_saved_bytes_or_an_error(tmp_path, monkeypatch, ending, load):
    path, outcomes = tmp_path / f"x.{ending}", collections.Counter()
    gdsdata.save({name: tensor.clone() if ending != "pt" else tensor for name, tensor in SMALL.items()}, path)
    content = path.read_bytes()
    if ending == "safetensors":  # a shorter header: its end is spaces
        text = content[8 : content.index(b"}}") + 2]
        begin = 8 + int.from_bytes(content[:8], "little")
        content = len(text).to_bytes(8, "little") + text + content[begin:]
    warned = []
    monkeypatch.setattr(engine, "warn_once", warned.append)
    for changed in damaged(content, random.Random(7)):
        path.write_bytes(changed)
        warned.clear()
        try:
            if load == "into":
                found = {
                    name: torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0] for name, tensor in SMALL.items()
                }
                gdsdata.load(path, into=found, verify=True)
            else:
                found = gdsdata.load(path, only=["*"] if load == "only" else None, verify=True)
        except (CorruptData, ValueError) as error:  # of other names and shapes in a header, with into=
            assert isinstance(error, CorruptData) or (ending, load) == ("safetensors", "into")
            outcomes["refused"] += 1
            continue
        is_right = {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in SMALL.items()}
        assert is_right or any("has no checksum" in message for message in warned), changed
        outcomes["right" if is_right else "warned of"] += 1
    assert outcomes["refused"] > 50 and outcomes["right"] > 0


# ----------------------------------------------------------------------------------------- a safetensors header

SAVED = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(6.0) + 10,
    "c": torch.arange(4, dtype=torch.int32),
    "half": torch.ones(2, 4).half(),
    "none": torch.zeros(0, 5),
}


@pytest.fixture
def headed(tmp_path):
    gdsdata.save(SAVED, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def edit_header(path, change):
    """Write a file with its header as ``change`` leaves it, in the same length."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header = change(header) or header
    text = json.dumps(header, separators=(",", ":")).encode().ljust(begin - 8)
    assert len(text) == begin - 8
    path.write_bytes(content[:8] + text + content[begin:])


def renamed(name, new):
    """Have the whole header call a tensor by another name."""

    def change(header):
        checksums = json.loads(header["__metadata__"]["gdsdata_crc32"])
        header[new], checksums[new] = header.pop(name), checksums.pop(name)
        header["__metadata__"]["gdsdata_crc32"] = json.dumps(checksums)

    return change


def swapped(header):
    """Exchange the names of two tensors, throughout the header."""
    checksums = json.loads(header["__metadata__"]["gdsdata_crc32"])
    for found in (header, checksums):
        found["a"], found["b"] = found["b"], found["a"]
    header["__metadata__"]["gdsdata_crc32"] = json.dumps(checksums)


def with_offsets_swapped(header):
    header["a"]["data_offsets"], header["b"]["data_offsets"] = header["b"]["data_offsets"], header["a"]["data_offsets"]


def with_another_checksum(header):
    checksums = json.loads(header["__metadata__"]["gdsdata_crc32"])
    header["__metadata__"]["gdsdata_crc32"] = json.dumps(checksums | {"b": checksums["b"] ^ 1})


def with_another_digit(header):
    digits = header["__metadata__"]["gdsdata_header_crc32"]
    header["__metadata__"]["gdsdata_header_crc32"] = digits[:-1] + "0f"[digits[-1] == "0"]


DAMAGED_HEADERS = {
    "dtype": lambda header: header["a"].update(dtype="I32"),
    "dtype-of-two-bytes": lambda header: header["half"].update(dtype="BF16"),
    "shape": lambda header: header["a"].update(shape=[3, 2]),
    "shape-of-nothing": lambda header: header["none"].update(shape=[7, 0]),
    "name": renamed("a", "z"),
    "name-of-nothing": renamed("none", "some"),
    "two-names": swapped,
    "offsets": with_offsets_swapped,
    "checksum": with_another_checksum,
    "checksum-of-the-header": with_another_digit,
}


@pytest.mark.parametrize("how", [{}, {"only": ["half"]}, {"dtype": torch.float64}])
@pytest.mark.parametrize("change", DAMAGED_HEADERS)
def test_a_damaged_part_of_a_safetensors_header_is_an_error(headed, change, how):
    edit_header(headed, DAMAGED_HEADERS[change])
    if change == "offsets" and how.get("only"):  # of tensors that are not read
        assert gdsdata.load(headed, verify=True, **how)["half"].sum() == 8
    else:
        words = r"'b|has the checksum" if change == "offsets" else r"names, dtypes, shapes and checksums in its header"
        with pytest.raises(CorruptData, match=words) as caught:
            gdsdata.load(headed, verify=True, **how)
        assert caught.value.path == str(headed)
    if change != "offsets":
        gdsdata.load(headed)  # nothing is compared


def test_a_damaged_header_is_an_error_before_a_tensor_is_filled(headed):
    edit_header(headed, DAMAGED_HEADERS["two-names"])
    into = {"a": torch.zeros(6), "b": torch.zeros(2, 3)}  # as the damaged header has them
    with pytest.raises(CorruptData, match="in its header"):
        gdsdata.load(headed, into=into, strict=False, verify=True)
    assert not into["a"].any() and not into["b"].any()


def test_headers_of_files_that_an_index_names_are_compared(headed):
    index = headed.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SAVED, headed.name)}))
    assert torch.equal(gdsdata.load(index, verify=True)["a"], SAVED["a"])
    edit_header(headed, DAMAGED_HEADERS["shape"])
    with pytest.raises(CorruptData, match="x.safetensors': names, dtypes, shapes"):
        gdsdata.load(index, verify=True)


def test_a_name_that_stands_once_in_a_damaged_header_is_warned_of(headed, monkeypatch):
    edit_header(headed, lambda header: header.update(z=header.pop("a")))
    warned = []
    monkeypatch.setattr(engine, "warn_once", warned.append)
    gdsdata.load(headed, verify=True)
    assert len(warned) == 1 and warned[0].startswith("z in 'x.safetensors' has no checksum, though others have")


def test_headers_that_other_programs_write_again_are_sound(headed):
    edit_header(headed, lambda header: dict(reversed(header.items())))
    assert torch.equal(gdsdata.load(headed, verify=True)["a"], SAVED["a"])
    with safetensors.safe_open(headed, "pt") as file:
        metadata = file.metadata()
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert metadata["format"] == "pt" and found.keys() == SAVED.keys()
    for part in (found, {name: found[name] for name in ("a", "half")}):  # with the metadata of all
        safetensors.torch.save_file(part, headed, metadata)
        loaded = gdsdata.load(headed, verify=True)
        assert loaded.keys() == part.keys() and all(torch.equal(loaded[name], SAVED[name]) for name in part)


def test_a_file_with_checksums_of_tensors_alone_is_sound(headed):
    edit_header(headed, lambda header: header["__metadata__"].pop("gdsdata_header_crc32") and None)
    assert torch.equal(gdsdata.load(headed, verify=True)["a"], SAVED["a"])
