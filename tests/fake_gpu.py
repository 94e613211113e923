"""A "cuda:0" for data sets if there is no GPU.

The engine runs over tests/cpp/fake_cuda, whose memory torch takes for the CPU's. The engine looks
its driver up once, so use this only in a process of its own (`helpers.in_new_process`).
"""

import ctypes
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from gdsdata.data.batches import ring
from gdsdata.io import engine

DEVICE = "cuda:0"
_SOURCE = Path(__file__).parent / "cpp" / "fake_cuda.cpp"


def build(folder: Path) -> Path:
    """Compile the fake driver, and return its path."""
    library = folder / "libfakecuda.so"
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, _SOURCE, "-o", library, "-ldl"], check=True)
    return library


def install(library: Path) -> ctypes.CDLL:
    """Make the fake the engine's driver, and return its test functions (tests/cpp/fake_cuda.h)."""
    os.environ["GDSDATA_LIBCUDA"] = str(library)
    engine._initialize = lambda device: None
    engine.stream_of = lambda device: 0  # the device's default stream
    ring.from_dlpack = _from_dlpack
    torch.set_num_threads(1)  # torch copies batches in the place of the GPU, beside the loop
    fake = ctypes.CDLL(str(library))
    fake.fake_cuda_set_link_bytes_per_s.argtypes = [ctypes.c_uint64]
    fake.fake_cuda_keep_busy.argtypes = [ctypes.c_int, ctypes.c_uint64]
    return fake


def wait_for_copies(fake: ctypes.CDLL) -> None:
    """Have each batch wait for its copies, because torch reads it on the processor."""
    context, event = ctypes.c_void_p(), ctypes.c_void_p()
    for code in (
        fake.cuInit(0),
        fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        fake.cuCtxPushCurrent_v2(context),
        fake.cuEventCreate(ctypes.byref(event), 2),
    ):
        assert code == 0

    def waited(capsule: Any) -> torch.Tensor:
        assert fake.cuEventRecord(event, None) == 0  # in the default stream
        while fake.cuEventQuery(event) != 0:
            time.sleep(1e-4)
        return _from_dlpack(capsule)

    ring.from_dlpack = waited


class _Head(ctypes.Structure):
    """The beginning of a DLTensor (dlpack.h)."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


def _from_dlpack(capsule: Any) -> torch.Tensor:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    head = _Head.from_address(pointer_of(capsule, b"dltensor"))
    assert head.device_type == 2  # kDLCUDA
    head.device_type, head.device_id = 1, 0  # kDLCPU
    return torch.utils.dlpack.from_dlpack(capsule)
