"""File formats: each finds the samples of its files and says where they lie (`index.Index`, `fields.FieldIndex`).

As in `gdsdata` itself, what is named here is imported when it is first asked for: files of one format need no other.
"""

from typing import TYPE_CHECKING

from gdsdata.lazy import lazily

if TYPE_CHECKING:  # for tools that read and do not run
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

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Arrow": "arrow",
        "LitData": "litdata",
        "Mds": "mds",
        "Megatron": "megatron",
        "Npy": "npy",
        "Npz": "npz",
        "Parquet": "parquet",
        "Records": "records",
        "Safetensors": "safetensors_files",
        "TFRecord": "tfrecord",
        "Tar": "tar",
        "Tokens": "tokens",
        "recognise": "registry",
        "register": "registry",
        "fields": "fields",  # what formats of one's own need
        "index": "index",
    },
)
