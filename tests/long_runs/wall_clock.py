"""Wall clocks that a program moves in its forked children, while they run.

The program starts itself again with `wall_clock.c` preloaded. Its own clock stays right, as do
those of the programs that it starts.
"""

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
SLOTS = 8  # processes with a clock of their own
_FILE = "WALL_CLOCK_FILE"


def build(library: Path) -> None:
    """Compile the library to preload.

    Raises:
        OSError, subprocess.CalledProcessError: there is no C compiler, or it fails.
    """
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)


def start_again() -> None:
    """Start this program again with movable clocks. Without a C compiler it goes on as it is."""
    if _FILE in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="gdsdata-clocks-"))
    library, file = folder / "wall_clock.so", folder / "offsets"
    try:
        build(library)
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(folder)
        return
    file.write_bytes(bytes(8 * SLOTS))
    others = os.environ.get("LD_PRELOAD", "")
    os.environ.update(LD_PRELOAD=f"{library}:{others}", WALL_CLOCK_FILE=str(file))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Clocks:
    """The clocks of this program's children. Only a program of `start_again` has them."""

    def __init__(self, file: Path) -> None:
        self._follow = ctypes.CDLL(None).wall_clock_follow
        self._offsets = mmap.mmap(os.open(file, os.O_RDWR | os.O_CLOEXEC), 8 * SLOTS)

    def follow(self, slot: int) -> None:
        """Have this process, and its forks to come, the clock of a slot."""
        if self._follow(slot):
            raise ValueError(f"the clocks have no slot {slot}: WALL_CLOCK_FILE names another file")

    def move(self, slot: int, seconds: float) -> None:
        """Set how wrong a slot's clock is. Processes that follow it see that at once."""
        struct.pack_into("=q", self._offsets, 8 * slot, int(seconds * 1e9))


def clocks() -> Clocks | None:
    """Return this program's clocks, or None if `start_again` could not preload them."""
    file = os.environ.pop(_FILE, None)
    if file is None:
        return None
    os.environ["LD_PRELOAD"] = os.environ["LD_PRELOAD"].partition(":")[2]
    try:
        return Clocks(Path(file))
    except AttributeError:  # the loader could not load the library, and has said so
        return None
    finally:
        shutil.rmtree(Path(file).parent)
