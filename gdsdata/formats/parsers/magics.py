"""The first bytes and the names by which a file's format is known.

There is no more in here than that takes, so that no format is imported for it. Each function is
called with the first `HEAD_BYTES` of a file (fewer if it is shorter) and its path.
"""

from __future__ import annotations

import os
import re

HEAD_BYTES = 512  # a tar's magic lies 257 bytes into its first header

NPY = b"\x93NUMPY"
LLM_C_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # the magic number says the tokens' type
MEGATRON = b"MMIDIDX\0\0"
PARQUET = b"PAR1"
ARROW = b"ARROW1"
ARROW_CONTINUES = 0xFFFFFFFF  # a stream's first four bytes

SHARDS_INDEX = "index.json"  # of MDS and of LitData
_MDS_BEGINS = rb'\s*\{\s*"(shards|version)"'
_LITDATA_BEGINS = rb'\s*\{\s*"(chunks|config)"'
DATASET_DICT = "dataset_dict.json"  # of `datasets`: its folder has a folder for each split
DATASET_INFO = "dataset_info.json"  # of `datasets`: what the data in its folder are
SAVED_STATE = "state.json"  # of `datasets`: which files in its folder have the data
# Files that `datasets`, the Hub, Spark and Databricks leave beside data: their names, or what these
# begin with.
BESIDE_DATA = (
    DATASET_INFO,
    SAVED_STATE,
    DATASET_DICT,
    "dataset_infos.json",
    "README.md",
    "LICENSE",
    "_SUCCESS",
    "_metadata",
    "_common_metadata",
    "_committed_",
    "_started_",
)
ICEBERG_LOG = "metadata"  # a folder of many things, unless it has files with names of Iceberg's
# Folders beside the files of a table, or beside the folder of these.
LOGS_OF_TABLES = ("_delta_log", ".hoodie", ICEBERG_LOG)
_OF_ICEBERG = r"(?a)(v\d+|\d{5,}-[0-9a-f-]{36})(\.gz)?\.metadata\.json(\.gz)?"  # compiled when first used
_OF_DATABRICKS = r"(?a)_(committed|started)_(vacuum)?\d+"  # compiled when first used
# Folders of files that Spark has not committed, and of logs that say which files count.
FOLDERS_BESIDE_DATA = frozenset(("_temporary", "_spark_metadata", "_delta_log", "_change_data"))


def is_npy(head: bytes, path: str) -> bool:
    return head.startswith(NPY)


def is_llm_c(head: bytes, path: str) -> bool:
    return int.from_bytes(head[:4], "little") in LLM_C_DTYPES


def is_tar(head: bytes, path: str) -> bool:
    return head[257:262] == b"ustar" or path.endswith((".tar", ".tar.gz", ".tgz"))  # which `Tar` refuses with a reason


def is_mds(head: bytes, path: str) -> bool:
    return os.path.basename(path) == SHARDS_INDEX and re.match(_MDS_BEGINS, head) is not None


def is_litdata(head: bytes, path: str) -> bool:
    return os.path.basename(path) == SHARDS_INDEX and re.match(_LITDATA_BEGINS, head) is not None


def is_megatron(head: bytes, path: str) -> bool:
    return head.startswith(MEGATRON)


def is_npz(head: bytes, path: str) -> bool:
    """Decide by the name, because torch's files and others are zips too."""
    return head.startswith(b"PK") and path.endswith(".npz")


def is_safetensors(head: bytes, path: str) -> bool:
    """Decide by the name, or else by the header."""
    from gdsdata.formats.parsers import safetensors_header

    return path.endswith(".safetensors") or (safetensors_header.recognises(head) and head[9:10] in (b'"', b"}", b" "))


def is_parquet(head: bytes, path: str) -> bool:
    return head.startswith(PARQUET)


def is_arrow(head: bytes, path: str) -> bool:
    """Decide by a file's magic and, because a stream's says little, by its name."""
    return head.startswith(ARROW) or (path.endswith(".arrow") and head[:4] == ARROW_CONTINUES.to_bytes(4, "little"))


def is_beside_data(path: str) -> bool:
    """Return whether it is a file that stands beside data and has none itself."""
    name = os.path.basename(path)
    return name in BESIDE_DATA or (name.startswith("_") and re.fullmatch(_OF_DATABRICKS, name) is not None)


def is_of_iceberg(name: str) -> bool:
    """Return whether a file in a folder `ICEBERG_LOG` says which files a table has."""
    return re.fullmatch(_OF_ICEBERG, name) is not None


def is_tfrecord(head: bytes, path: str) -> bool:
    """Decide by the checksum of the first record's length: there is no cheaper sign."""
    from gdsdata.formats.parsers import tfrecord_records

    return tfrecord_records.recognises(head)
