"""Models of transformers, read and written by gdsdata's engine. Checked with transformers 5.24."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.open_object import read_object
from gdsdata.checkpoint.safetensors.installed import CountedOpen, install, uninstall
from gdsdata.checkpoint.safetensors.opened import SafeSlice, resolved
from gdsdata.checkpoint.safetensors.planned_load import PlannedLoad
from gdsdata.checkpoint.synced_folders import make_folder, synced_below
from gdsdata.checkpoint.urls import is_url, joined, local_folder, plain_path, store_and_key
from gdsdata.fork_safe import fork_safe_lock
from gdsdata.integrations.versions import importing
from gdsdata.io import engine
from gdsdata.storage.store import ObjectInfo

with importing("transformers"):
    from transformers import core_model_loading, modeling_utils

    if not (hasattr(core_model_loading, "spawn_materialize") and hasattr(modeling_utils, "safe_open")):
        raise ImportError("spawn_materialize or safe_open, which `hooks` replaces, is not there")

__all__ = ["from_pretrained", "hooks", "save_pretrained"]

_FILES_AT_A_TIME = 16
# Weights that transformers cannot use beside safetensors, or that it reads by other libraries.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".tflite")

_loading: Any = core_model_loading
_models: Any = modeling_utils
_changing = fork_safe_lock()  # guards what follows, and the functions of transformers that are replaced
_users = 0
_stock: dict[str, Any] = {}
_urls: dict[str, str] = {}  # of the objects that empty files stand for
_loads: weakref.WeakKeyDictionary[ThreadPoolExecutor, PlannedLoad] = weakref.WeakKeyDictionary()


@collector_paused()
def from_pretrained(
    auto_class: Any, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kw: Any
) -> Any:
    """Call ``auto_class.from_pretrained``, with the weights read by gdsdata's engine.

        model = from_pretrained(AutoModelForCausalLM, "llama/", dtype="auto", device_map="cuda")
        tokenizer = from_pretrained(AutoTokenizer, "s3://bucket/llama/")

    See `hooks` for what is different. For a URL, the small files of the folder (configuration,
    tokenizer) are copied to a temporary folder. Weights are read from the objects in ranges, and
    must be safetensors files. Python's garbage collector pauses meanwhile.

    Args:
        auto_class: a class of transformers, such as `AutoModelForCausalLM` or `AutoTokenizer`.
        pretrained_model_name_or_path: a folder, the URL of one, or a name that transformers knows.
        args, kw: of ``auto_class.from_pretrained``.

    Raises:
        FileNotFoundError: a URL has no objects.
        OSError, ValueError, RuntimeError: those of transformers. ValueError too: a URL has a scheme
            that is not known.
        IoError, CorruptData: a file of weights cannot be read, or is damaged.
    """
    path = plain_path(os.fspath(pretrained_model_name_or_path))
    if not is_url(path):
        with hooks():
            return auto_class.from_pretrained(path, *args, **kw)
    url = joined(path, kw.pop("subfolder", "") or "").rstrip("/")
    with hooks(), _small_files_of(url) as folder:
        found = auto_class.from_pretrained(folder, *args, **kw)
    model: Any = found[0] if isinstance(found, tuple) else found
    for one in (model, getattr(model, "config", model)):
        if getattr(one, "name_or_path", None) == folder:
            one.name_or_path = path
    return found


def save_pretrained(model: Any, save_directory: str | os.PathLike[str], **kw: Any) -> Any:
    """Call ``model.save_pretrained``, with the weights written by gdsdata's engine.

    All files are on storage when this returns. Each file of weights replaces an older one as a
    whole, but not the folder: if a crash must leave one whole, save into a new one each time.

    Args:
        model: of transformers or peft, or anything else with such a method.
        save_directory: a folder.
        kw: of ``model.save_pretrained``.

    Raises:
        SafetensorError: weights cannot be written (an `IoError` too), or the disk is full.
        ValueError: ``save_directory`` is a URL.

    Stream semantics: weights on a GPU are read after all work that its current stream has so far.
    """
    folder = local_folder("save_directory", save_directory, ", and upload its files")
    if not os.path.exists(folder):
        make_folder(folder)
    with synced_below(folder), hooks():
        return model.save_pretrained(folder, **kw)


@contextlib.contextmanager
def hooks() -> Iterator[None]:
    """Have transformers, and others that use `safetensors`, work through gdsdata; for ``with``.

        with hooks():
            model = AutoModelForCausalLM.from_pretrained("llama/", device_map="cuda")
            model.save_pretrained("copy/")

    This holds for all threads of the process, and may be nested. Models are the same bit for bit,
    and so are reports and errors about names. transformers still renames, converts, casts, ties
    and shards. Weights are read straight to their device, in batches of at most 256 MiB or one
    larger weight. At most four are in memory besides the tensors that transformers has taken.

    - On the CPU, weights are read now. transformers alone maps the file: the first use reads it.
    - Shards of a rank, and tensors that are quantized on the way, are read one by one. So are all
      tensors if a ``device_map`` sends some to "disk".
    - transformers reads files other than safetensors. accelerate reads weights that are on the disk
      when the model uses them.
    """
    global _users
    install()
    try:
        with _changing:
            if _users == 0:
                _stock["safe_open"], _stock["spawn"] = _models.safe_open, _loading.spawn_materialize
                _models.safe_open, _loading.spawn_materialize = _open, _spawn_materialize
            _users += 1
        try:
            yield
        finally:
            with _changing:
                _users -= 1
                if _users == 0:
                    _models.safe_open, _loading.spawn_materialize = _stock.pop("safe_open"), _stock.pop("spawn")
    finally:
        uninstall()


def _open(filename: str, *args: Any, **kw: Any) -> CountedOpen:
    return CountedOpen(_urls.get(filename, filename), *args, **kw)


def _spawn_materialize(
    thread_pool: ThreadPoolExecutor | None, tensor: Any, device: Any = None, dtype: Any = None, *args: Any, **kw: Any
) -> Any:
    """Stand for `transformers.core_model_loading.spawn_materialize`, called for each tensor."""
    is_sharded = args[:1] != (None,) if args else kw.get("sharding_op") is not None
    target = resolved("cpu" if device is None else device)
    if thread_pool is None or is_sharded or not isinstance(tensor, SafeSlice) or not engine.reaches(target):
        return _stock["spawn"](thread_pool, tensor, device, dtype, *args, **kw)
    load = _loads.setdefault(thread_pool, PlannedLoad())  # each load has a pool of its own
    return load.add(tensor, target, dtype)


@contextlib.contextmanager
def _small_files_of(url: str) -> Iterator[str]:
    """Copy a folder of objects, without its weights, and return the copy.

    Files of safetensors are empty in the copy. `_open` opens their objects instead.
    """
    store, prefix = store_and_key(url + "/")
    found = [one for one in store.list(prefix, "/") if isinstance(one, ObjectInfo) and one.size_bytes > 0]
    names = [os.path.basename(one.url) for one in found if not one.url.endswith(_OTHER_WEIGHTS)]
    if not names:
        raise FileNotFoundError(f"{url}/ has no objects: give the URL of a folder that save_pretrained wrote")
    with tempfile.TemporaryDirectory(prefix="gdsdata-transformers-") as folder:

        def copy(name: str) -> None:
            with open(os.path.join(folder, name), "wb") as file:
                if name.endswith(".safetensors"):
                    _urls[file.name] = joined(url, name)
                else:
                    file.write(read_object(joined(url, name)))

        try:
            with ThreadPoolExecutor(_FILES_AT_A_TIME) as threads:
                list(threads.map(copy, names))
            yield folder
        finally:
            for name in names:
                _urls.pop(os.path.join(folder, name), None)
