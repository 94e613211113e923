"""The functions of `safetensors` and `safetensors.torch`, on gdsdata's engine.

    from gdsdata.safetensors import load_file, load_model, safe_open, save_file, save_model

They have the signatures, results and errors of the package (checked with 0.8), and take URLs as
well as paths. `install` puts them under the package's own names, for libraries that use it.
"""

from gdsdata.checkpoint.safetensors.errors import SafetensorError
from gdsdata.checkpoint.safetensors.files import load, load_file, save, save_file
from gdsdata.checkpoint.safetensors.installed import install, installed, uninstall
from gdsdata.checkpoint.safetensors.models import load_model, save_model
from gdsdata.checkpoint.safetensors.opened import safe_open

__all__ = [
    "SafetensorError",
    "install",
    "installed",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "uninstall",
]
