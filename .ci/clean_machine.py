"""Follow docs/start.md word by word on a clean machine: a bare Debian or Ubuntu in a folder.

`.ci/clean_machine.py --suite bookworm` makes that system by debootstrap, with its Python and
without a compiler. It installs the wheels of dist/ there as the page says, runs the page's blocks,
and compares what they print. `--tests FILE ...` runs files of tests afterwards. stdout has the
transcript. It needs the root user, debootstrap and unshare. docs/internals/wheels.md has what was
tried with it.
"""

from __future__ import annotations

import argparse
import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import headers

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "start.md"
PLACE = ROOT / "build" / "clean"
MACHINE = os.uname().machine
UBUNTU_SUITES = ("focal", "jammy", "noble", "resolute")
UBUNTU_KEYS = "usr/share/keyrings/ubuntu-archive-keyring.gpg"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
TEST_PACKAGES = ["pytest>=9", "pytest-timeout", "hypothesis", "pyarrow", "pyyaml", "safetensors", "zstandard"]
TEST_FOLDERS = ("tests", "docs", "examples")
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "end of the block"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "zig")


@dataclass(frozen=True)
class Page:
    """The blocks of the page, and the output that the page shows below some of them."""

    install: str
    session: list[tuple[str, str]]
    doctor: tuple[str, str]


def read_page(text: str) -> Page:
    """Read the page. The first of its two ways to install is that by wheels."""
    code: list[tuple[str, str]] = []
    shown: dict[int, str] = {}
    for language, how, content in BLOCK.findall(text):
        if language != "text":
            code.append((language, content))
        elif how.strip() == "output":
            shown[len(code) - 1] = content
    blocks = [(language, content, shown.get(at, "")) for at, (language, content) in enumerate(code)]
    install = next(content for language, content, _ in blocks if language == "shell")
    session = [(content, output) for language, content, output in blocks if language == "python"]
    [doctor] = [(content, output) for language, content, output in blocks if language == "console"]
    return Page(install, session, doctor)


@dataclass(frozen=True)
class Machine:
    """A system in a folder, for the processor `arch`."""

    suite: str
    arch: str
    folder: Path
    mirror: str = ""  # debootstrap's own

    @property
    def emulated(self) -> bool:
        return self.arch != MACHINE

    def make(self) -> None:
        """Unpack the system, then let it install its Python.

        Raises:
            SystemExit: debootstrap or apt-get failed, or the processor's programs do not run here.
        """
        ubuntu = self.suite in UBUNTU_SUITES
        command = ["debootstrap", "--variant=minbase", f"--arch={headers.DEBIAN_ARCH[self.arch]}"]
        if ubuntu:
            here = Path("/")
            root = here if (here / UBUNTU_KEYS).exists() else headers.debian_package("ubuntu-keyring", MACHINE)
            command += ["--components=main,universe", f"--keyring={root / UBUNTU_KEYS}"]
        scripts = "/usr/share/debootstrap/scripts"  # an older debootstrap does not know the names of newer suites
        command += [self.suite, str(self.folder), self.mirror, f"{scripts}/{'gutsy' if ubuntu else 'sid'}"]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            raise SystemExit(
                f"clean_machine: debootstrap made no {self.suite} for {self.arch}: its log is "
                f"{self.folder}/debootstrap/debootstrap.log. The programs of another processor need "
                "qemu-user-static and binfmt_misc"
            )
        self.copy_in(Path("/etc/resolv.conf"), "etc/resolv.conf")
        self.run("apt-get -q update", quiet=True)
        self.install("python3", "python3-venv", "ca-certificates")

    def install(self, *packages: str) -> None:
        """Install packages of the system."""
        self.run(f"apt-get -qy install --no-install-recommends {shlex.join(packages)}", quiet=True)

    def copy_in(self, path: Path, to: str) -> None:
        target = self.folder / to
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            target.unlink(missing_ok=True)
            shutil.copyfile(path, target)

    def run(self, script: str, quiet: bool = False) -> str:
        """Run a script of bash in /root/start, show what it prints, and return it.

        The mounts are in a namespace of their own, so none outlives the script.
        """
        start = self.folder / "root" / "start"
        start.mkdir(parents=True, exist_ok=True)
        mounts = [f"mount -t proc proc {self.folder}/proc"]
        # torch for aarch64 crashes while it is imported if /sys describes another processor.
        paths = ("/dev",) if self.emulated else ("/dev", "/sys")
        mounts += [f"mount --rbind {path} {self.folder}{path}" for path in paths]
        enter = shlex.join(["chroot", str(self.folder), "bash", "-eo", "pipefail", "-c", f"cd /root/start\n{script}"])
        command = ["unshare", "--mount", "--pid", "--fork", "bash", "-ec", " && ".join([*mounts, f"exec {enter}"])]
        running = subprocess.Popen(
            command, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        printed = []
        for line in running.stdout:
            printed.append(line)
            if not quiet:
                print(line, end="", flush=True)
        if running.wait() != 0:
            print("".join(printed) if quiet else "")
            raise SystemExit(f"clean_machine: this failed in {self.suite} for {self.arch}:\n{script}")
        return "".join(printed)

    @staticmethod
    def environment() -> dict[str, str]:
        """Return a new user's environment, with what reaches an index of packages from here."""
        passed = re.compile(r"PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST)|(https?|no)_proxy", re.IGNORECASE)
        found = {name: value for name, value in os.environ.items() if passed.fullmatch(name)}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        fixed = {"HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "PIP_CERT": CERTIFICATES}
        return {**found, **fixed, "PATH": path, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}


def foreign_packages(machine: Machine, names: list[str]) -> str:
    """Install packages of another processor from here, because pip is slow in emulation.

    Returns:
        Commands that let the environment `env` see them. The page's pip then finds them installed.
    """
    python = machine.run('python3 -c "import sys; print(*sys.version_info[:2], sep=chr(46))"', quiet=True).strip()
    tags = [f"manylinux_2_{minor}_{machine.arch}" for minor in range(17, 35)]
    platforms = [word for tag in [*tags, f"manylinux2014_{machine.arch}"] for word in ("--platform", tag)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", *platforms, "--python-version", python]
    target = machine.folder / "root" / "packages"
    if not target.exists():
        subprocess.run([*pip, "--no-compile", "--target", str(target), *names], check=True)
    site = f"env/lib/python{python}/site-packages"
    return f"rm -rf {site}/setuptools*\necho /root/packages > {site}/packages.pth\n"


def compare(printed: str, shown: str, block: str) -> None:
    """Compare an output with the page's, where "..." stands for any text."""
    if shown and not doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS):
        raise SystemExit(f"clean_machine: {PAGE.name} shows\n{shown}\nand this is\n{printed}\nbelow\n{block}")


def follow(machine: Machine, page: Page, dist: Path, with_packages: str, torch: str) -> None:
    shutil.rmtree(machine.folder / "root" / "start", ignore_errors=True)
    machine.run("head -n 1 /etc/os-release; ldd --version | sed -n 1p; python3 --version; uname -m")
    machine.run(f"! command -v {' '.join(COMPILERS)} || {{ echo 'a compiler is here'; exit 1; }}")
    machine.copy_in(dist, "root/start/dist")
    install = page.install.replace("-m venv env\n", f"-m venv env\n{with_packages}")
    if torch:
        install = install.replace('"torch>=2.9"', f'"torch=={torch}.*"')
    print(install, flush=True)
    machine.run(install)
    (machine.folder / "root/start/session.py").write_text(
        "".join(f"{code}\nprint({END_OF_BLOCK!r})\n" for code, _ in page.session)
    )
    printed = machine.run(". env/bin/activate\npython session.py 2> errors.txt || { cat errors.txt; exit 1; }")
    for (code, shown), output in zip(page.session, printed.split(f"{END_OF_BLOCK}\n"), strict=False):
        compare(output, shown, code)
    command, shown = page.doctor
    compare(machine.run(f". env/bin/activate\n{command}"), shown, command)
    print(f"clean_machine: {PAGE.name} was followed in {machine.suite}, {machine.arch}: all outputs are as shown")


def run_tests(machine: Machine, files: list[str], packages: list[str], more: str) -> None:
    """Run files of tests in /root/start/away, with the installed package and more packages."""
    for folder in TEST_FOLDERS:
        machine.copy_in(ROOT / folder, f"root/start/away/{folder}")
    for name in ("pyproject.toml", "README.md"):
        machine.copy_in(ROOT / name, f"root/start/away/{name}")
    machine.run(f". env/bin/activate\npip install -q {shlex.join([*TEST_PACKAGES, *packages])}")
    machine.run(f". env/bin/activate\ncd away\npython -m pytest -q {shlex.join(files)} {more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="bookworm", help="of Debian, or one of " + ", ".join(UBUNTU_SUITES))
    parser.add_argument("--arch", choices=tuple(headers.DEBIAN_ARCH), default=MACHINE)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder of the wheels")
    parser.add_argument("--torch", default="", metavar="2.11", help="this version in the place of the newest one")
    parser.add_argument("--root", type=Path, help="a folder for the system, which stays; default: a new one")
    parser.add_argument("--mirror", default="", help="of packages; default: debootstrap's own")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="run these tests with the wheel")
    parser.add_argument("--packages", nargs="*", default=[], metavar="NAME", help="install these for the tests")
    parser.add_argument("--system", nargs="*", default=[], metavar="NAME", help="the same, of the system: libcurl4")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="more arguments of pytest")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not all(map(shutil.which, ("debootstrap", "unshare", "chroot"))):
        raise SystemExit("clean_machine: run it as root, with debootstrap installed (apt-get install debootstrap)")
    if not list(arguments.dist.glob("*.whl")):
        raise SystemExit(f"clean_machine: {arguments.dist} has no wheel: run make wheels first, or name it by --dist")
    folder = arguments.root or PLACE / f"{arguments.suite}-{arguments.arch}"
    machine = Machine(arguments.suite, arguments.arch, folder.resolve(), arguments.mirror)
    try:
        if not (machine.folder / "usr/bin/python3").exists():
            machine.make()
        if Path(CERTIFICATES).exists():
            machine.copy_in(Path(CERTIFICATES), CERTIFICATES[1:])
        torch = f"torch=={arguments.torch}.*" if arguments.torch else "torch>=2.9"
        names = [torch, "numpy", *(TEST_PACKAGES + arguments.packages if arguments.tests else [])]
        with_packages = foreign_packages(machine, names) if machine.emulated else ""
        follow(machine, read_page(PAGE.read_text()), arguments.dist, with_packages, arguments.torch)
        if arguments.system:
            machine.install(*arguments.system)
        if arguments.tests:
            run_tests(machine, arguments.tests, arguments.packages, arguments.pytest)
    finally:
        if arguments.root is None:
            shutil.rmtree(machine.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
