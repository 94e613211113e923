"""transformers by gdsdata's engine, beside transformers alone: models, reports, errors, files."""

import functools
import gc
import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, torchrun
from object_server import serving

import gdsdata
from gdsdata.checkpoint.safetensors import planned_load
from gdsdata.errors import CorruptData

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from gdsdata.integrations import transformers as ours

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SMALL = {"vocab_size": 64, "num_attention_heads": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_key_value_heads": 1, **SMALL}
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA | {"num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ),
}
WAYS = {
    "as saved": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "auto dtype on the cpu": {"dtype": "auto", "device_map": "cpu"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Write each model by transformers alone, in one file and in several."""
    folder = tmp_path_factory.mktemp("models")
    for kind, make in KINDS.items():
        torch.manual_seed(0)
        model = make()
        model.save_pretrained(folder / kind)
        model.save_pretrained(folder / f"{kind} in shards", max_shard_size="8KB")
        assert (folder / f"{kind} in shards" / "model.safetensors.index.json").is_file()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def added(monkeypatch) -> list[str]:
    """Note the tensors that the engine was asked for."""
    noted: list[str] = []
    add = planned_load.PlannedLoad.add
    monkeypatch.setattr(
        planned_load.PlannedLoad, "add", lambda self, one, *others: noted.append(one.name) or add(self, one, *others)
    )
    return noted


def class_of(kind: str):
    return transformers.AutoModelForSeq2SeqLM if kind.startswith("t5") else transformers.AutoModelForCausalLM


def outputs(model) -> torch.Tensor:
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        return model(input_ids=ids, **({"labels": ids} if model.config.is_encoder_decoder else {})).logits


def assert_same_models(one, other) -> None:
    assert type(one) is type(other)
    for its, mine in ((one.named_parameters, other.named_parameters), (one.named_buffers, other.named_buffers)):
        expected, found = dict(its(remove_duplicate=False)), dict(mine(remove_duplicate=False))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert ties(found) == ties(expected)
    configs = [model.config.to_dict() | {"_name_or_path": ""} for model in (one, other)]
    assert configs[0] == configs[1]
    assert torch.equal(outputs(one), outputs(other))


def ties(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return for each name the first one that has its memory."""
    first: dict[int, str] = {}
    return [first.setdefault(tensor.data_ptr(), name) for name, tensor in tensors.items()]


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, way) for kind in KINDS for way in WAYS), *((f"{kind} in shards", "as saved") for kind in KINDS)],
)
def test_a_model_is_that_of_transformers_bit_for_bit(folders, added, kind, way):
    expected = class_of(kind).from_pretrained(folders[kind], **WAYS[way])
    assert not added
    model = ours.from_pretrained(class_of(kind), folders[kind], **WAYS[way])
    assert_same_models(expected, model)
    assert len(added) == len(set(added)) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_gpu_is_that_of_transformers(folders, added, kind, dtype):
    how = {"dtype": dtype, "device_map": "cuda"}
    expected = class_of(kind).from_pretrained(folders[kind], **how)
    model = ours.from_pretrained(class_of(kind), folders[kind], **how)
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert_same_models(expected.cpu(), model.cpu())
    assert added


DISK = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
MAPS = {
    "one device": {"": "cpu"},
    "modules": {"model": "cpu", "lm_head": "cpu"},
    "some on disk": DISK | {"lm_head": "cpu"},
    "the head on disk": {"model": "cpu", "lm_head": "disk"},
}


@pytest.mark.parametrize("kind", ["llama", "llama in shards", "mixtral"])
@pytest.mark.parametrize("devices", MAPS)
def test_a_device_map_by_module_also_with_weights_on_disk_is_followed(folders, tmp_path, added, devices, kind):
    def made(call, name):
        return call(class_of(kind), folders[kind], device_map=MAPS[devices], offload_folder=tmp_path / name)

    expected = made(lambda one, path, **kw: one.from_pretrained(path, **kw), "stock")
    assert not added
    model = made(ours.from_pretrained, "ours")
    with gdsdata.torch_hooks(safetensors=True) as hooks:
        hooked = made(lambda one, path, **kw: one.from_pretrained(path, **kw), "hooked")
    for one in (model, hooked):
        assert getattr(one, "hf_device_map", None) == getattr(expected, "hf_device_map", None)
        assert torch.equal(outputs(one), outputs(expected))
        for (name, its), (_, mine) in zip(expected.named_parameters(), one.named_parameters(), strict=True):
            assert its.device == mine.device and (its.is_meta or torch.equal(its, mine)), name
    assert bool(added) == ("disk" not in devices), "transformers asks for tensors one by one if some go to the disk"
    assert hooks.report().left_to_torch == ()
    weights_bytes = sum(
        one.nbytes for one in transformers.AutoModelForCausalLM.from_pretrained(folders[kind]).parameters()
    )
    assert hooks.report().served["safetensors.safe_open"].bytes >= weights_bytes
    resaved = [{path.name: path.read_bytes() for path in (tmp_path / name).glob("*")} for name in ("stock", "ours")]
    assert resaved[0] == resaved[1] and bool(resaved[0]) == (devices == "some on disk" and kind == "mixtral")


def test_a_model_split_by_a_tp_plan_has_the_shards_of_transformers_alone(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA | {"num_key_value_heads": 2, "num_hidden_layers": 2})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    script = Path(__file__).parent / "transformers_ranks.py"
    code, said = torchrun(2, script, tmp_path / "model", tmp_path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert code == 0, said
    whole = sum(one.numel() for one in transformers.LlamaForCausalLM(config).parameters())
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["sharded"] > 0 and found["values"] < whole
        assert found["from_pretrained is the same"] and found["hooks are the same"]
        assert found["left"] == [] and found["read"] == 4 * found["values"], "only the shards are read"


def test_the_hooks_serve_the_stock_call_and_are_gone_afterwards(folders, added):
    replaced = transformers.modeling_utils, transformers.core_model_loading
    before = replaced[0].safe_open, replaced[0].safe_save_file, replaced[1].spawn_materialize
    with ours.hooks(), ours.hooks():
        model = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    assert added
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(OSError), ours.hooks():
        transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"].parent)
    assert before == (replaced[0].safe_open, replaced[0].safe_save_file, replaced[1].spawn_materialize)


def test_hooks_that_could_not_be_put_in_place_are_put_there_the_next_time(folders, added, monkeypatch):
    with monkeypatch.context() as patched:
        patched.delattr(transformers.core_model_loading, "spawn_materialize")
        with pytest.raises(AttributeError), ours.hooks():
            pass
    with ours.hooks():
        transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    assert added


def test_batches_are_read_ahead_within_a_bound(folders, monkeypatch):
    """Each batch has one tensor here. Experts are merged, so all of a layer are taken at once."""
    monkeypatch.setattr(planned_load, "_BATCH_BYTES", 1)
    live, most = set(), []
    begin, take = planned_load._Batch.begin, planned_load._Batch.take

    def noted_begin(self):
        live.add(id(self))
        most.append(len(live))
        begin(self)

    def noted_take(self, key):
        live.discard(id(self))
        return take(self, key)

    monkeypatch.setattr(planned_load._Batch, "begin", noted_begin)
    monkeypatch.setattr(planned_load._Batch, "take", noted_take)
    assert_same_models(
        class_of("llama").from_pretrained(folders["llama"]), ours.from_pretrained(class_of("llama"), folders["llama"])
    )
    assert max(most) <= 4
    model = ours.from_pretrained(class_of("mixtral"), folders["mixtral"])
    assert_same_models(class_of("mixtral").from_pretrained(folders["mixtral"]), model)
    assert not live


def test_a_model_is_quantized_by_torchao_while_it_is_loaded_saved_and_loaded_again(folders, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    made = [call(folders["llama"], quantization_config=config) for call in LLAMA_BY]
    assert type(made[1].model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    ours.save_pretrained(made[1], tmp_path)
    loaded = [call(tmp_path) for call in LLAMA_BY]
    assert all(torch.equal(outputs(model), outputs(made[0])) for model in (*made, *loaded))


LLAMA_BY = (
    transformers.LlamaForCausalLM.from_pretrained,
    functools.partial(ours.from_pretrained, transformers.LlamaForCausalLM),
)


def test_weights_have_memory_of_their_own(folders):
    model = ours.from_pretrained(class_of("llama"), folders["llama"])
    for tensor in model.parameters():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


# -------------------------------------------------------------------------------------------------- reports and errors


def altered(folder: Path, to: Path, change) -> Path:
    """Copy a model, with other weights."""
    from safetensors.torch import load_file, save_file

    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    save_file(change(load_file(folder / "model.safetensors")), to / "model.safetensors", {"format": "pt"})
    return to


def test_missing_and_unexpected_names_are_reported_alike(folders, tmp_path):
    def change(state):
        state["model.layers.0.other.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
        return state

    def stock(*args, **arguments):
        return class_of("llama").from_pretrained(*args, **arguments)

    def mine(*args, **arguments):
        return ours.from_pretrained(class_of("llama"), *args, **arguments)

    folder = altered(folders["llama"], tmp_path / "m", change)
    reports = []
    for from_pretrained in (stock, mine):
        torch.manual_seed(1)  # the missing weight is drawn
        model, report = from_pretrained(folder, output_loading_info=True)
        reports.append((report, model.model.layers[0].mlp.up_proj.weight))
    assert reports[0][0] == reports[1][0]
    assert reports[0][0]["missing_keys"] == {"model.layers.0.mlp.up_proj.weight"}
    assert torch.equal(reports[0][1], reports[1][1])


def of_other_sizes(folders, folder: Path) -> Path:
    return altered(folders["llama"], folder, lambda state: state | {"model.norm.weight": torch.ones(3)})


def without_weights(folders, folder: Path) -> Path:
    altered(folders["llama"], folder, dict)
    (folder / "model.safetensors").unlink()
    return folder


def without_a_shard(folders, folder: Path) -> Path:
    folder.mkdir()
    for path in folders["llama in shards"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    next(folder.glob("model-00002-*")).unlink()
    return folder


@pytest.mark.parametrize("make", [of_other_sizes, without_weights, without_a_shard])
def test_errors_are_those_of_transformers(folders, tmp_path, make):
    folder = make(folders, tmp_path / "m")
    with pytest.raises(Exception) as expected:
        class_of("llama").from_pretrained(folder)
    with pytest.raises(type(expected.value)) as found:
        ours.from_pretrained(class_of("llama"), folder)
    assert str(found.value) == str(expected.value)


def test_damaged_weights_are_an_error_of_safetensors_too(folders, tmp_path):
    from safetensors import SafetensorError

    folder = altered(folders["llama"], tmp_path / "m", dict)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-5])
    with pytest.raises(SafetensorError) as error:
        ours.from_pretrained(class_of("llama"), folder)
    assert isinstance(error.value, CorruptData)


# -------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize(("kind", "size"), [("llama", "8KB"), ("mixtral", "8KB"), ("gpt2", "1GB"), ("t5", "1GB")])
def test_saved_folders_have_the_files_that_transformers_writes(folders, tmp_path, kind, size):
    model = class_of(kind).from_pretrained(folders[kind])
    model.save_pretrained(tmp_path / "its", max_shard_size=size)
    ours.save_pretrained(model, tmp_path / "mine", max_shard_size=size)
    its, mine = ({path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("its", "mine"))
    assert mine.keys() == its.keys()
    assert [name for name in its if mine[name] != its[name]] == []
    assert_same_models(model, class_of(kind).from_pretrained(tmp_path / "mine"))


@pytest.mark.parametrize("wrong_by_s", [0, 7200], ids=["right", "hours ahead"])
def test_every_saved_file_and_its_folder_are_synced(folders, tmp_path, monkeypatch, wrong_by_s):
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + wrong_by_s)
    model = class_of("gpt2").from_pretrained(folders["gpt2"])
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: synced.add(os.readlink(f"/proc/self/fd/{one}")) or fsync(one))
    (tmp_path / "older").write_text("not ours")
    save = model.save_pretrained

    def with_the_clock_set_back(folder, **kw):
        save(folder, **kw)
        os.utime(tmp_path / "config.json", (1, 1))

    model.save_pretrained = with_the_clock_set_back
    ours.save_pretrained(model, tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {"older"}
    assert synced == {str(tmp_path), str(tmp_path.parent), *(str(tmp_path / name) for name in names)}


@pytest.mark.parametrize(
    "url, remedy",
    [("s3://bucket/m", "upload its files"), ("gcs://bucket/m", "upload its files"), ("s3:/bucket/m", "second slash")],
)
def test_a_url_to_save_to_is_refused_with_a_remedy(folders, tmp_path, monkeypatch, url, remedy):
    monkeypatch.chdir(tmp_path)
    model = class_of("gpt2").from_pretrained(folders["gpt2"])
    with pytest.raises(ValueError, match=remedy):
        ours.save_pretrained(model, url)
    assert not list(tmp_path.iterdir())


def test_a_file_url_names_the_folder_of_a_model(folders, tmp_path):
    model = ours.from_pretrained(class_of("gpt2"), f"file://{folders['gpt2']}")
    ours.save_pretrained(model, f"file://{tmp_path}/a%20copy")
    assert {path.name for path in (tmp_path / "a copy").iterdir()} >= {"config.json", "model.safetensors"}


def test_a_scheme_that_is_not_known_is_refused_before_a_model_is_looked_for():
    with pytest.raises(ValueError, match="no scheme that gdsdata knows"):
        ours.from_pretrained(class_of("gpt2"), "gcs://bucket/m")


# ---------------------------------------------------------------------------------------------------------- peft, URLs


def test_an_adapter_of_peft_is_saved_and_loaded_alike(folders, tmp_path, added):
    peft = pytest.importorskip("peft")

    def base():
        return class_of("gpt2").from_pretrained(folders["gpt2"])

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(base(), config)
    model.save_pretrained(tmp_path / "its")
    ours.save_pretrained(model, tmp_path / "mine")
    weights = "adapter_model.safetensors"
    assert (tmp_path / "mine" / weights).read_bytes() == (tmp_path / "its" / weights).read_bytes()
    expected = peft.PeftModel.from_pretrained(base(), tmp_path / "its")
    with ours.hooks():
        found = peft.PeftModel.from_pretrained(base(), tmp_path / "mine")
        by_transformers = class_of("gpt2").from_pretrained(tmp_path / "mine")
    assert torch.equal(outputs(expected), outputs(found))
    assert torch.equal(outputs(expected), outputs(by_transformers))
    assert any("lora" in name for name in added)


def test_a_folder_at_a_url_is_read_in_ranges(folders, monkeypatch):
    kind = "llama in shards"
    expected = class_of(kind).from_pretrained(folders[kind])
    with serving(monkeypatch) as server:
        server.put_folder(folders[kind], "runs/m/")
        server.content["runs/m/pytorch_model.bin"] = b"never read"
        server.content["runs/m/deeper/model.safetensors"] = b"never read"
        model = ours.from_pretrained(class_of(kind), server.url("runs/m/"))
        config = ours.from_pretrained(transformers.AutoConfig, server.url("runs"), subfolder="m")
        with pytest.raises(FileNotFoundError, match="has no objects"):
            ours.from_pretrained(class_of(kind), server.url("none"))
        asked = [key for _, key, _, _ in server.requests]
    assert model.name_or_path == server.url("runs/m/")
    assert model.config.name_or_path == model.name_or_path
    assert_same_models(expected, model)
    assert config.vocab_size == 64
    assert not [key for key in asked if key.endswith(".bin") or "deeper" in key]
    assert not ours._urls


def test_the_example_trains_saves_and_loads(monkeypatch, capsys):
    example = REPOSITORY / "examples" / "integrations" / "transformers_llm.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--steps", "2"])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "the same parameters: True" in printed
    assert "model.safetensors" in printed
    assert printed.endswith("read back as it was trained: True\n")


def test_the_garbage_collector_pauses_during_a_load(folders):
    """A full collection looks at all objects of transformers: it takes longer than reading a GB."""
    collected = []

    def note(phase, info):
        if phase == "start" and info["generation"] > 0:
            collected.append(info["generation"])

    def collections(load):
        collected.clear()
        load(transformers.AutoModelForCausalLM, folders["llama"])
        return len(collected)

    thresholds = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    gc.callbacks.append(note)
    try:
        assert collections(lambda auto_class, path: auto_class.from_pretrained(path)) > 20
        assert collections(ours.from_pretrained) <= 3  # at its ends, and while it waits for storage
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
