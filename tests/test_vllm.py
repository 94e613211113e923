"""The loader for vLLM, against vLLM if it is installed, and against stand-ins of three versions.

Stand-ins have the interfaces that `loader_interfaces` read in vLLM's wheels. They behave as below.
"""

import dataclasses
import glob
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import types
from pathlib import Path

import loader_interfaces
import pytest
import torch
from helpers import REPOSITORY
from object_server import serving
from test_served_weights import assert_same, bytes_asked_for, safetensors, save_model

from gdsdata.doctor import frameworks
from gdsdata.errors import CorruptData
from gdsdata.integrations import versions
from gdsdata.integrations.served_weights import LOAD_FORMAT

VERSIONS = [version for version in json.loads(loader_interfaces.RECORD.read_text()) if version.startswith("vllm")]
ADAPTER = "gdsdata.integrations.vllm"


class Model(torch.nn.Module):
    """A model that loads parameters by the names in the checkpoint, and says which."""

    def __init__(self, shapes, dtypes):
        super().__init__()
        self.names = list(shapes)
        self.held = {}
        for number, name in enumerate(shapes):
            parameter = torch.nn.Parameter(torch.empty(shapes[name], dtype=dtypes[name]), requires_grad=False)
            self.register_parameter(f"p{number}", parameter)

    def load_weights(self, weights):
        for name, tensor in weights:
            assert name not in self.held
            self.held[name] = tensor
        return {f"p{self.names.index(name)}" for name in self.held if name in self.names}


def model_of(state):
    return Model({name: one.shape for name, one in state.items()}, {name: one.dtype for name, one in state.items()})


# ------------------------------------------------------------------------------------------- stand-ins' behavior


def init_base(self, load_config):
    self.load_config = load_config


def init(self, load_config):
    type(self).__mro__[-2].__init__(self, load_config)
    assert load_config.load_format in ("auto", "safetensors"), "Unknown load_format"
    assert not load_config.model_loader_extra_config, "Unexpected extra config keys"


def prepare(self, model_name_or_path, **others):
    pattern = (others["allow_patterns_overrides"] or ["*.safetensors"])[0]
    files = glob.glob(os.path.join(model_name_or_path, others.get("subfolder") or "", pattern))
    index = os.path.join(model_name_or_path, "model.safetensors.index.json")
    if os.path.isfile(index) and others["allow_patterns_overrides"] is None:
        named = set(json.loads(Path(index).read_text())["weight_map"].values())
        files = [path for path in files if os.path.basename(path) in named]
    if not files:
        raise RuntimeError(f"Cannot find any model weights with `{model_name_or_path}`")
    returned = inspect.signature(sys.modules[DEFAULT].DefaultModelLoader._prepare_weights).return_annotation
    return (model_name_or_path, files, True, "an index")[: returned.count(",") + 1]


def all_weights(self, model_config, model):
    sources = [source_of(self, model_config.model, model), *getattr(model, "secondary_weights", ())]
    for source in sources:
        yield from self._get_weights_iterator(source)


def source_of(loader, path, model=None, **others):
    source = loader.Source(path, None, **others)
    source.allow_patterns_overrides = getattr(model, "allow_patterns_overrides", None)
    return source


def load(self, model, model_config):
    loaded = model.load_weights(self.get_all_weights(model_config, model))
    lost = {name for name, _ in model.named_parameters()} - loaded
    if lost:
        raise ValueError(f"Following weights were not initialized from checkpoint: {lost}")


DEFAULT = "vllm.model_executor.model_loader.default_loader"
BEHAVIORS = {
    "BaseModelLoader.__init__": init_base,
    "DefaultModelLoader.__init__": init,
    "DefaultModelLoader._prepare_weights": prepare,
    "DefaultModelLoader.get_all_weights": all_weights,
    "DefaultModelLoader.load_weights": load,
    "DefaultModelLoader.download_model": lambda self, model_config: self._get_weights_iterator(
        source_of(self, model_config.model)
    ),
    "get_current_vllm_config_or_none": lambda: None,
    "model_parallel_is_initialized": lambda: False,
    "should_skip_weight": lambda weight_name, local_expert_ids: (
        weight_name.startswith("layers.") and int(weight_name.split(".")[1]) not in local_expert_ids
    ),
}


@pytest.fixture(params=[*VERSIONS, "installed"])
def vllm(request, monkeypatch):
    """The modules of a version, and gdsdata's adapter in ``loader`` that was made with it."""
    if request.param == "installed":
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("vllm is not installed")
        registered = importlib.import_module("vllm.model_executor.model_loader")
    else:
        loaders = {}
        behaviors = BEHAVIORS | {
            "register_model_loader": lambda load_format: lambda loader: loaders.setdefault(load_format, loader),
            "get_model_loader": lambda load_config: loaders[load_config.load_format](load_config),
        }
        version = request.param.split()[1]
        monkeypatch.setattr(versions, "installed", lambda: frameworks.installed(lambda name: version))
        for module in [one for one in sys.modules if one.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, module)
        modules = loader_interfaces.stand_ins(request.param, behaviors)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        registered = modules["vllm.model_executor.model_loader"]
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    adapter = importlib.import_module(ADAPTER)
    adapter.register()
    yield types.SimpleNamespace(
        loader=lambda **extra: registered.get_model_loader(load_config(extra)),
        adapter=adapter,
        name=request.param,
    )
    sys.modules.pop(ADAPTER, None)


def load_config(extra):
    made = importlib.import_module("vllm.config.load").LoadConfig(load_format=LOAD_FORMAT)
    made.model_loader_extra_config = extra
    return made


def model_config(folder, **others):
    given = {"model": str(folder), "revision": None, "quantization": None, "is_moe": False, "multimodal_config": None}
    return types.SimpleNamespace(**given, **others)


def loading(vllm, folder, model, **extra):
    loader = vllm.loader(**extra)
    if hasattr(loader, "_init_ep_weight_filter") and vllm.name == "installed":
        loader._init_ep_weight_filter = lambda config: None  # it asks vLLM's global configuration
    loader.load_weights(model, model_config(folder))
    return loader


def test_a_model_is_loaded_and_may_hold_what_it_gets(vllm, tmp_path):
    expected = save_model(tmp_path)
    model = model_of(expected)
    loader = loading(vllm, tmp_path, model)
    assert_same(model.held.items(), expected)
    assert loader.counter_before_loading_weights > 0
    loader.download_model(model_config(tmp_path))


def test_weights_come_from_a_url_and_those_of_a_draft_do_not(vllm, tmp_path, monkeypatch):
    expected = save_model(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "config").mkdir()
    with serving(monkeypatch) as server:
        server.put_folder(tmp_path, "llama/")
        model = model_of(expected)
        loader = loading(vllm, tmp_path / "config", model, weights=server.url("llama/"))
        assert_same(model.held.items(), expected)
        loader.download_model(model_config(tmp_path / "config"))
        draft = loader.get_all_weights(model_config(tmp_path / "config", runner_type="draft"), model)
        with pytest.raises(RuntimeError, match="Cannot find any model weights"):
            list(draft)


def test_a_draft_in_the_checkpoint_of_its_target_has_its_weights(vllm, tmp_path, monkeypatch):
    """As with multi-token prediction: vLLM's configuration has the target's path."""
    expected = save_model(tmp_path)
    (tmp_path / "config").mkdir()
    kind = importlib.import_module("vllm.config.speculative").SpeculativeConfig
    assert "target_model_config" in {field.name for field in dataclasses.fields(kind)}
    target = types.SimpleNamespace(target_model_config=model_config(tmp_path / "config"))
    current = types.SimpleNamespace(speculative_config=target)
    monkeypatch.setattr(vllm.adapter, "get_current_vllm_config_or_none", lambda: current)
    loader = vllm.loader(weights=str(tmp_path))
    draft = model_config(f"{tmp_path / 'config'}/", runner_type="draft")
    assert_same(loader.get_all_weights(draft, model_of(expected)), expected)
    target.target_model_config = model_config(tmp_path)
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        list(loader.get_all_weights(draft, model_of(expected)))


def test_sources_have_prefixes_and_patterns(vllm, tmp_path):
    expected = save_model(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    model = model_of({f"second.{name}": one for name, one in expected.items()})
    loader = vllm.loader()
    second = source_of(loader, str(tmp_path), prefix="second.")
    second.allow_patterns_overrides = ["model-*.safetensors"]
    model.secondary_weights = [second]
    model.allow_patterns_overrides = ["model-1-*.safetensors"]
    found = dict(loader.get_all_weights(model_config(tmp_path), model))
    first = [name for name in found if not name.startswith("second.")]
    assert 0 < len(first) < len(expected)
    assert_same(((name, found[f"second.{name}"]) for name in expected), expected)


def test_sources_in_another_folder_keep_their_patterns(vllm, tmp_path):
    (tmp_path / "weights").mkdir()
    expected = save_model(tmp_path / "weights")
    (tmp_path / "weights" / "consolidated.safetensors").unlink()
    model, loader = model_of(expected), vllm.loader(weights=str(tmp_path / "weights"))
    model.allow_patterns_overrides = ["other-*.safetensors", "model-2-*.safetensors", "*.safetensors"]
    model.secondary_weights = [source_of(loader, str(tmp_path), prefix="second.")]
    found = [name for name, _ in loader.get_all_weights(model_config(tmp_path), model)]
    of_shard = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())["weight_map"]
    first = [name for name in expected if of_shard[name].startswith("model-2-")]
    assert found == [*first, *(f"second.{name}" for name in expected)] and first


def test_sources_in_another_folder_keep_their_subfolder(vllm, tmp_path):
    if "0.14" in vllm.name:
        pytest.skip("its sources have no subfolder")
    (tmp_path / "weights" / "part").mkdir(parents=True)
    expected = save_model(tmp_path / "weights" / "part")
    loader = vllm.loader(weights=str(tmp_path / "weights"))
    loader._note_weights(model_config(tmp_path))
    assert_same(loader._get_weights_iterator(source_of(loader, str(tmp_path), subfolder="part")), expected)


def test_torchao_with_weights_elsewhere_is_refused(vllm, tmp_path):
    loader = vllm.loader(weights="s3://bucket/llama/")
    loader.load_config.safetensors_load_strategy = "torchao"
    with pytest.raises(ValueError, match=r"torchao is read by vLLM.*'s3://bucket/llama/'"):
        list(loader.get_all_weights(model_config(tmp_path), model_of({})))


def test_experts_of_other_ranks_are_not_read(vllm, tmp_path, monkeypatch):
    if "0.14" in vllm.name or vllm.name == "installed":
        pytest.skip("there is no such filter, or its names are vLLM's")
    expected = save_model(tmp_path)
    loader = vllm.loader()
    loader.local_expert_ids, sizes = {1, 2}, bytes_asked_for(monkeypatch)
    names = [name for name, _ in loader.get_all_weights(model_config(tmp_path), model_of(expected))]
    assert names == [name for name in expected if not name.startswith("layers.") or name[7] in "12"]
    assert sum(sizes) == sum(expected[name].nbytes for name in names)


@pytest.mark.parametrize("damage", ["shard", "name", "cut", "parameter"])
def test_a_missing_or_damaged_part_of_a_model_is_an_error(vllm, tmp_path, damage):
    expected = save_model(tmp_path)
    shard = tmp_path / "model-2-of-12.safetensors"
    kinds = {"shard": FileNotFoundError, "name": CorruptData, "cut": CorruptData, "parameter": ValueError}
    if damage == "shard":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "name":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        index["weight_map"]["lost"] = shard.name
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        expected = {**expected, "of no file": torch.zeros(3)}
    with pytest.raises(kinds[damage], match="model-2-of-12" if damage != "parameter" else "not initialized"):
        loading(vllm, tmp_path, model_of(expected))


@pytest.mark.parametrize("extra", [{}, {"once": "rank"}])
@pytest.mark.parametrize("is_initialized", [True, False])
def test_the_tensor_parallel_group_reads_together(vllm, tmp_path, monkeypatch, extra, is_initialized):
    save_model(tmp_path)
    loader = vllm.loader(**extra)
    weights = loader.get_all_weights(model_config(tmp_path), model_of({}))
    adapter, calls, group = vllm.adapter, [], object()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(adapter.parallel_state, "model_parallel_is_initialized", lambda: is_initialized)
    monkeypatch.setattr(adapter.parallel_state, "get_tp_group", lambda: types.SimpleNamespace(device_group=group))
    monkeypatch.setattr(adapter, "served_weights", lambda *args, **kw: calls.append(kw) or iter(()))
    assert list(weights) == []
    (call,) = calls
    assert call["group"] is (group if is_initialized else None) and call["once"] == extra.get("once")


def test_other_settings_are_refused(vllm):
    with pytest.raises(ValueError, match="knows 'weights' and 'once'"):
        vllm.loader(concurrency=16)


def test_a_version_without_what_is_overridden_is_refused(vllm, monkeypatch):
    if vllm.name == "installed":
        pytest.skip("it has them")
    monkeypatch.delattr(vllm.adapter.DefaultModelLoader, "_prepare_weights")
    monkeypatch.setattr("gdsdata.integrations.overrides.version", lambda package: "9.9")
    with pytest.raises(RuntimeError, match=r"vllm 9.9 is not served: its GDSModelLoader has no _prepare_weights"):
        vllm.loader()


def test_scales_that_vllm_decodes_are_decoded(vllm, tmp_path, monkeypatch):
    """A vLLM later than 0.33 puts two tensors of a checkpoint together."""

    def decoded(weights):
        for name, tensor in weights:
            if not name.endswith(".nvfp4_csf_exceptions"):
                yield name.removesuffix(".nvfp4_csf_fixed"), tensor

    module = types.ModuleType("vllm.model_executor.model_loader.csf_scales")
    module.decode_csf_scale_streams = decoded
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, ADAPTER)
    streams = {f"a.scale.nvfp4_csf_{part}": torch.arange(number) for number, part in ((3, "fixed"), (2, "exceptions"))}
    safetensors.save_file(streams, tmp_path / "model.safetensors")
    loader = importlib.import_module(ADAPTER).GDSModelLoader(load_config({}))
    found = loader._get_weights_iterator(source_of(loader, str(tmp_path), prefix="second."))
    assert_same(found, {"second.a.scale": torch.arange(3)})


def test_a_newer_version_warns(vllm, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: frameworks.installed(lambda name: "0.34.0"))
    monkeypatch.delitem(sys.modules, ADAPTER)
    with pytest.warns(
        RuntimeWarning, match=r"vllm was tested with version 0.14.1, 0.23.0, 0.33.0, and 0.34.0 is installed"
    ):
        importlib.import_module(ADAPTER)


def test_methods_that_the_adapter_overrides_exist(vllm):
    loader = vllm.adapter.GDSModelLoader
    for name, own in vars(loader).items():
        if inspect.isfunction(own) and name not in ("_note_weights", "_is_local"):
            theirs = inspect.signature(getattr(loader.__mro__[1], name)).parameters
            assert list(inspect.signature(own).parameters)[:2] == list(theirs)[:2], name


def test_the_entry_point_is_declared():
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"gdsdata": f"{ADAPTER}:register"}
