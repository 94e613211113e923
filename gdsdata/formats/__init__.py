"""File formats: each finds the samples of its files and says where they lie (`index.Index`, `fields.FieldIndex`)."""

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
