"""Pack engines into wheels by setuptools, with the tags and times that we choose."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent.parent
FIRST_DATE_OF_ZIP = "315532800"  # 1980-01-01


def commit_time() -> str:
    """Return the commit's time in seconds since 1970, or 1980-01-01 without a repository."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    ran = subprocess.run(command, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    return ran.stdout.strip() if ran is not None and ran.returncode == 0 else FIRST_DATE_OF_ZIP


def distribution() -> Distribution:
    """Return what pyproject.toml says. The working directory must be the repository's root."""
    made = Distribution({"script_name": "setup.py"})
    made.parse_config_files()
    return made


def pack(engine: Path, python: str, platform: str, out: Path) -> Path:
    """Put the engine and the package into a wheel.

    Args:
        engine: The extension, built for this Python and platform.
        python: As "3.12".
        platform: The wheel's tag, as "manylinux_2_28_x86_64".
        out: The folder for the wheel.

    Returns:
        The wheel's path.
    """
    number = python.replace(".", "")
    arch = platform.split("_", 3)[-1]
    base = ROOT / "build" / "wheels" / "packing" / number  # distutils makes each folder once a process
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)

    class BuiltEngine(build_ext):
        def get_ext_filename(self, name: str) -> str:
            return f"{name.replace('.', '/')}.cpython-{number}-{arch}-linux-gnu.so"

        def build_extensions(self) -> None:
            place = Path(self.get_ext_fullpath(self.extensions[0].name))
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engine, place)

    class Wheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return f"cp{number}", f"cp{number}", platform

        def write_wheelfile(self, *arguments: object, **options: object) -> None:
            super().write_wheelfile(*arguments, **options)
            # The checkout's permissions depend on its umask.
            for path in Path(self.bdist_dir).rglob("*"):
                path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)

    made = distribution()
    made.cmdclass = {"build_ext": BuiltEngine, "bdist_wheel": Wheel}
    options = {"build": {"build_base": str(base / "build")}, "egg_info": {"egg_base": str(base)}}
    options["bdist_wheel"] = {"dist_dir": str(out), "bdist_dir": str(base / "wheel")}
    for command, values in options.items():
        made.get_option_dict(command).update({name: ("wheels.py", value) for name, value in values.items()})
    made.verbose = 0
    made.run_command("bdist_wheel")
    [(_, _, wheel)] = made.dist_files
    return Path(wheel)
