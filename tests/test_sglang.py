"""The loader for SGLang, against stand-ins of three versions.

They have the interfaces that `loader_interfaces` read in SGLang's wheels, and behave as below.
"""

import glob
import importlib
import json
import os
import sys
import types

import loader_interfaces
import pytest
import torch
from helpers import REPOSITORY
from object_server import serving
from test_served_weights import assert_same, save_model

from gdsdata.doctor import frameworks
from gdsdata.errors import CorruptData
from gdsdata.integrations import sglang_plugin, versions

VERSIONS = [version for version in json.loads(loader_interfaces.RECORD.read_text()) if version.startswith("sglang")]
ADAPTER = "gdsdata.integrations.sglang"
LOADER = "sglang.srt.model_loader.loader"
CONFIG = "sglang.srt.configs.load_config"


class Model(torch.nn.Module):
    secondary_weights = ()

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


# ------------------------------------------------------------------------------------------- stand-ins' behavior


def init_base(self, load_config):
    self.load_config = load_config


def init(self, load_config):
    sys.modules[LOADER].BaseModelLoader.__init__(self, load_config)
    assert not load_config.model_loader_extra_config, "Unexpected extra config keys"


def prepare(self, model_name_or_path, revision, fall_back_to_pt, allow_patterns_overrides=None):
    assert self.load_config.load_format == "safetensors" and not fall_back_to_pt
    pattern = "model-*.safetensors" if allow_patterns_overrides in (None, ...) else allow_patterns_overrides[0]
    files = glob.glob(os.path.join(model_name_or_path, pattern))
    if not files:
        raise RuntimeError(f"Cannot find any model weights with `{model_name_or_path}`")
    return model_name_or_path, files, True


def all_weights(self, model_config, model):
    for source in [source_of(self, model_config), *model.secondary_weights]:
        yield from self._get_weights_iterator(source)


def source_of(loader, model_config, **others):
    return loader.Source(model_config.model_path, None, model_config=model_config, **others)


def stock_weights(self, source, **others):
    yield "stock", self.load_config.draft_model_idx


def post_init(self):
    if isinstance(self.load_format, str):
        self.load_format = sys.modules[CONFIG].LoadFormat(self.load_format)


def loader_of(load_config, model_config):
    assert isinstance(load_config.load_format, type)
    return load_config.load_format(load_config)


def no_configuration():
    raise ValueError("config namespace 'model' not published")


BEHAVIORS = {
    "BaseModelLoader.__init__": init_base,
    "DefaultModelLoader.__init__": init,
    "DefaultModelLoader._prepare_weights": prepare,
    "DefaultModelLoader._get_all_weights": all_weights,
    "DefaultModelLoader._get_weights_iterator": stock_weights,
    "LoadConfig.__post_init__": post_init,
    "get_model_loader": loader_of,
    "maybe_add_mtp_safetensors": lambda hf_weights_files, hf_folder, index_file, hf_config: hf_weights_files,
    "get_global_server_args": no_configuration,
    "get_model": no_configuration,
    "model_parallel_is_initialized": lambda: False,
}


@pytest.fixture(params=VERSIONS)
def sglang(request, monkeypatch):
    """The modules of a version, in which gdsdata's plug-in is registered."""
    choices, hooks = [], []
    behaviors = BEHAVIORS | {
        "add_load_format_choices": lambda **given: choices.extend(*given.values()),
        "HookRegistry.register": lambda cls, target, hook, hook_type, source: hooks.append((target, hook, hook_type)),
    }
    modules = loader_interfaces.stand_ins(request.param, behaviors)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    version = request.param.split()[1]
    monkeypatch.setattr(versions, "installed", lambda: frameworks.installed(lambda name: version))
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    sglang_plugin.register()
    ((target, hook, hook_type),) = hooks
    assert choices == ["gdsdata"] and hook_type is modules["sglang.srt.plugins.hook_registry"].HookType.AROUND
    owner, _, name = target.rpartition(".")
    config = getattr(modules[CONFIG], owner.rpartition(".")[2])
    stock = getattr(config, name)
    monkeypatch.setattr(config, name, lambda self: hook(stock, self))  # as SGLang applies an AROUND hook
    assert ADAPTER not in sys.modules  # an SGLang that loads another format imports no loader of ours
    yield types.SimpleNamespace(config=config, get_model_loader=modules[LOADER].get_model_loader, name=request.param)
    sys.modules.pop(ADAPTER, None)


def loader(sglang, **extra):
    config = sglang.config(load_format="gdsdata", model_loader_extra_config=extra)
    return sglang.get_model_loader(config, None)


def model_config(folder, is_draft_model=False):
    return types.SimpleNamespace(model_path=str(folder), is_draft_model=is_draft_model, hf_config=None)


def weights(loader, config, model=None):
    return loader._get_all_weights(config, model or Model())


def test_other_formats_are_those_of_sglang(sglang):
    assert sglang.config(load_format="safetensors").load_format == "safetensors"
    with pytest.raises(ValueError, match="other"):
        sglang.config(load_format="other")


def test_a_model_is_read_in_the_order_of_safetensors(sglang, tmp_path):
    expected = save_model(tmp_path)
    assert_same(weights(loader(sglang), model_config(tmp_path)), expected)


def test_a_reload_reads_another_folder(sglang, tmp_path):
    """SGLang's update of weights from a disk asks the loader for the iterator of one source."""
    expected = save_model(tmp_path)
    made = loader(sglang)
    assert_same(made._get_weights_iterator(source_of(made, model_config(tmp_path))), expected)


def test_weights_come_from_a_url_and_those_of_a_draft_do_not(sglang, tmp_path, monkeypatch):
    expected = save_model(tmp_path)
    (tmp_path / "config").mkdir()
    with serving(monkeypatch) as server:
        server.put_folder(tmp_path, "llama/")
        made = loader(sglang, weights=server.url("llama/"))
        assert_same(weights(made, model_config(tmp_path / "config")), expected)
        with pytest.raises(RuntimeError, match="Cannot find any model weights"):
            list(weights(made, model_config(tmp_path / "config", is_draft_model=True)))


def test_a_draft_in_the_checkpoint_of_its_target_has_its_weights(sglang, tmp_path, monkeypatch):
    """As with multi-token prediction: SGLang's configuration has the target's path."""
    expected = save_model(tmp_path)
    (tmp_path / "config").mkdir()
    made = loader(sglang, weights=str(tmp_path))
    current = types.SimpleNamespace(model_path=str(tmp_path / "config"))
    monkeypatch.setattr(sys.modules[ADAPTER], "get_model", lambda: current)
    draft = model_config(f"{tmp_path / 'config'}/", is_draft_model=True)
    assert_same(weights(made, draft), expected)
    made.load_config.draft_model_idx = 3
    with pytest.raises(ValueError, match="a layer of a draft is read by SGLang itself"):
        list(weights(made, draft))
    made.load_config.draft_model_idx, current.model_path = None, str(tmp_path)
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        list(weights(made, draft))


def test_sources_have_prefixes_and_patterns(sglang, tmp_path):
    expected = save_model(tmp_path)
    made, model = loader(sglang), Model()
    model.secondary_weights = [source_of(made, model_config(tmp_path), prefix="second.")]
    if hasattr(model.secondary_weights[0], "allow_patterns_overrides"):
        model.secondary_weights[0].allow_patterns_overrides = ["model-1-*.safetensors"]
    found = dict(weights(made, model_config(tmp_path), model))
    assert_same(((name, found[name]) for name in expected), expected)
    second = [name for name in found if name.startswith("second.")]
    assert 0 < len(second) < len(expected) or (len(second) == len(expected) and "0.5.23" not in sglang.name)


def test_sources_in_another_folder_keep_patterns(sglang, tmp_path):
    if "0.5.23" not in sglang.name:
        pytest.skip("its sources have no patterns")
    (tmp_path / "weights").mkdir()
    expected = save_model(tmp_path / "weights")
    made, model = loader(sglang, weights=str(tmp_path / "weights")), Model()
    model.secondary_weights = [source_of(made, model_config(tmp_path), prefix="second.")]
    model.secondary_weights[0].allow_patterns_overrides = ["other-*", "model-1-*.safetensors"]
    found = [name for name, _ in weights(made, model_config(tmp_path), model)]
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())["weight_map"]
    assert found == [*expected, *(f"second.{name}" for name in expected if index[name].startswith("model-1-"))]


def test_a_layer_of_a_draft_is_left_to_sglang(sglang, tmp_path):
    made = loader(sglang)
    made.load_config.draft_model_idx = 3
    assert list(made._get_weights_iterator(source_of(made, model_config(tmp_path)))) == [("stock", 3)]


def test_a_damaged_shard_is_an_error(sglang, tmp_path):
    save_model(tmp_path)
    os.truncate(tmp_path / "model-2-of-12.safetensors", 1000)
    with pytest.raises(CorruptData, match="model-2-of-12"):
        list(weights(loader(sglang), model_config(tmp_path)))


@pytest.mark.parametrize("extra", [{}, {"once": "rank"}])
@pytest.mark.parametrize("is_initialized", [True, False])
def test_the_tensor_parallel_group_reads_together(sglang, tmp_path, monkeypatch, extra, is_initialized):
    save_model(tmp_path)
    made = loader(sglang, **extra)
    weights_of = weights(made, model_config(tmp_path))
    adapter, calls, group = sys.modules[ADAPTER], [], object()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(adapter.parallel_state, "model_parallel_is_initialized", lambda: is_initialized)
    monkeypatch.setattr(adapter.parallel_state, "get_tp_group", lambda: types.SimpleNamespace(device_group=group))
    monkeypatch.setattr(adapter, "served_weights", lambda *args, **kw: calls.append(kw) or iter(()))
    assert list(weights_of) == []
    (call,) = calls
    assert call["group"] is (group if is_initialized else None) and call["once"] == extra.get("once")


def test_other_settings_are_refused(sglang):
    with pytest.raises(ValueError, match="knows 'weights' and 'once'"):
        loader(sglang, num_threads=8)


def test_a_newer_version_warns(sglang, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: frameworks.installed(lambda name: "0.6.0"))
    with pytest.warns(
        RuntimeWarning, match=r"sglang was tested with version 0.5.13, 0.5.18, 0.5.23, and 0.6.0 is installed"
    ):
        loader(sglang)


def test_the_entry_point_is_declared():
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["sglang.srt.plugins"] == {"gdsdata": "gdsdata.integrations.sglang_plugin:register"}
    assert callable(importlib.import_module("gdsdata.integrations.sglang_plugin").register)
