"""File formats. Each returns an `index.SampleIndex` of its files' samples.

A name of this package is imported when it is first used, so files of one format need no other
format's module.
"""

from typing import TYPE_CHECKING

from gdsdata.formats.catalog import FORMATS
from gdsdata.lazy import lazily

if TYPE_CHECKING:  # for tools that read the code; a test compares __all__ with the catalog
    from gdsdata.formats.arrow import Arrow
    from gdsdata.formats.litdata import LitData
    from gdsdata.formats.mds import Mds
    from gdsdata.formats.megatron import Megatron
    from gdsdata.formats.npy import Npy
    from gdsdata.formats.npz import Npz
    from gdsdata.formats.parquet import Parquet
    from gdsdata.formats.records import Records
    from gdsdata.formats.registry import recognise, register
    from gdsdata.formats.safetensors_files import Safetensors
    from gdsdata.formats.tar import Tar
    from gdsdata.formats.tfrecord import TFRecord
    from gdsdata.formats.tokens import Tokens

__all__ = [
    "Arrow",
    "LitData",
    "Mds",
    "Megatron",
    "Npy",
    "Npz",
    "Parquet",
    "Records",
    "Safetensors",
    "TFRecord",
    "Tar",
    "Tokens",
    "recognise",
    "register",
]

_HOMES = {
    **{entry.name: entry.module for entry in FORMATS},
    "recognise": "registry",
    "register": "registry",
    "fields": "fields",  # modules that a format of your own needs
    "index": "index",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
