"""The formats of gdsdata: the one place that names them."""

from __future__ import annotations


class Entry:
    """A format.

    Args:
        name: of its class, in `gdsdata.formats`.
        module: of `gdsdata.formats` that has the class.
        title: names its files in errors.
        ``recogniser``: the function of `gdsdata.formats.parsers.magics` that recognizes its files;
            "" if nothing in a file shows the format.
    """

    def __init__(self, name: str, module: str, title: str, recogniser: str) -> None:
        self.name, self.module, self.title, self.recogniser = name, module, title, recogniser


# The format of a file is the first that recognizes it. The format is then made with its defaults.
FORMATS = (
    Entry("Npy", "npy", "npy", "is_npy"),
    Entry("Tokens", "tokens", "llm.c's tokens", "is_llm_c"),
    Entry("Tar", "tar", "WebDataset's tar", "is_tar"),
    Entry("Mds", "mds", "MDS's index.json", "is_mds"),
    Entry("LitData", "litdata", "LitData's index.json", "is_litdata"),
    Entry("Megatron", "megatron", "Megatron's .idx", "is_megatron"),
    Entry("Npz", "npz", "npz", "is_npz"),
    Entry("Safetensors", "safetensors_files", "safetensors", "is_safetensors"),
    Entry("Parquet", "parquet", "Parquet", "is_parquet"),
    Entry("Arrow", "arrow", "Arrow", "is_arrow"),
    Entry("TFRecord", "tfrecord", "TFRecord", "is_tfrecord"),
    Entry("Records", "records", "records", ""),
)
