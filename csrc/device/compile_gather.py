"""Makes gather_kernel.cpp of gather_kernel.cu: `python csrc/device/compile_gather.py`.

NVRTC, which torch's CUDA builds bring, compiles it to PTX for the oldest GPU it knows; newer ones
run that too. The PTX is marked as of version 7.0, so that drivers from CUDA 11.0 on take it; it
uses nothing newer.
"""

import ctypes
import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARCHITECTURE = "compute_75"
HEAD = """// Made of gather_kernel.cu by compile_gather.py: edit that, and run this. SHA-256 of what it was made of:
// %s
#include "device/gather_kernel.h"

namespace gdsdata {

// clang-format off
const char* const kGatherPtx = R"ptx(
"""
TAIL = """)ptx";
// clang-format on

}  // namespace gdsdata
"""


def find_nvrtc():
    for folder in sys.path:
        for library in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(library))
    return None


def compile_to_ptx(nvrtc, source):
    def call(name, *arguments):
        result = getattr(nvrtc, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} answered {result}: {log()}")

    def text_of(size_name, text_name):
        size = ctypes.c_size_t()
        getattr(nvrtc, size_name)(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, text_name)(program, text)
        return text.value.decode()

    def log():
        return text_of("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")

    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"gather_kernel.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={ARCHITECTURE}".encode())
    call("nvrtcCompileProgram", program, 1, options)
    ptx = text_of("nvrtcGetPTXSize", "nvrtcGetPTX")
    ptx = re.sub(r"^//.*\n", "", ptx, flags=re.MULTILINE)  # the compiler's version
    return re.sub(r"^\.version .*$", ".version 7.0", ptx, flags=re.MULTILINE).strip() + "\n"


def main():
    nvrtc = find_nvrtc()
    if nvrtc is None:
        raise SystemExit("there is no NVRTC here: pip install nvidia-cuda-nvrtc, or run this in torch's environment")
    source = (HERE / "gather_kernel.cu").read_text()
    head = HEAD % hashlib.sha256(source.encode()).hexdigest()
    (HERE / "gather_kernel.cpp").write_text(head + compile_to_ptx(nvrtc, source) + TAIL)


if __name__ == "__main__":
    main()
