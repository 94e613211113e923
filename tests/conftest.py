"""Fixtures and hooks of all tests.

Tests marked `gpu` need a CUDA device. GDSDATA_REQUIRE_GPU=1 turns its absence into a failure, as
GDSDATA_REQUIRE_BROWSER=1 does for tests with the fixture `browser`. The guard against hangs is in
pyproject.toml (timeout, faulthandler_timeout); a longer test is marked timeout(seconds).
"""

import functools
import gc
import os
import shutil
import subprocess
import sys

import pytest
from servers.fixtures import azurite, gcs, rclone, seaweedfs  # noqa: F401

# Asks NVML, not the driver, whether there is a GPU: initialized CUDA would spoil tests that fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# torch's threads sleep when they wait for one another. By default they spin, on cores that other
# tests need: a tenth of all CPU time.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


@functools.cache
def lack_of_gpu() -> str:
    """Return the reason why CUDA cannot be used here, or ""."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the collector off while tests are collected, and from what is there then.

    It would go through the objects of 9,000 tests and of the modules they import, again and again.
    Later it looks through old objects a tenth as often as by default. There are many, of modules
    that tests import, and it took up to a sixth of a worker's time.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    """Return the path of the fake CUDA driver, for `fake_gpu.install`."""
    import fake_gpu

    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        pytest.skip("no C++ compiler is here to build the driver that stands in")
    return fake_gpu.build(tmp_path_factory.mktemp("fake_driver"))


@pytest.fixture(scope="module")
def browser():
    """Run Chromium for a file of tests. Without one they are skipped, or fail (see browser.py)."""
    import browser

    with browser.chromium() as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def own_stores():
    """Forget the stores, the objects and the cache of a file of tests: they hold for a process."""
    yield
    if "gdsdata.storage.settings" in sys.modules:
        from helpers import forget_stores

        forget_stores()


@pytest.fixture
def quick_programs(monkeypatch, request):
    """Start the test's programs as forks of a process with their imports (quick_programs.py).

    Tests marked `new_interpreter` start interpreters all the same. Programs of tests marked
    `whole_end` end as an interpreter does.
    """
    import quick_programs

    if request.node.get_closest_marker("whole_end"):
        monkeypatch.setenv(quick_programs.WHOLE_END, "1")

    if request.node.get_closest_marker("new_interpreter") is None:
        monkeypatch.setattr(subprocess, "Popen", quick_programs.Popen)


@pytest.fixture(scope="module")
def programs_that_train():
    """Import once, for all programs of a module, what an optimizer imports at its first use.

    It takes 0.7 s of CPU time. Its end is not silent, so it is not imported for all modules.
    """
    import quick_programs

    with quick_programs.importing("torch._dynamo"):
        yield


# Runs before the test's fixtures, which might already need the GPU.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None or not (lack := lack_of_gpu()):
        return
    if os.environ.get("GDSDATA_REQUIRE_GPU", "0") not in ("", "0"):
        pytest.fail(f"GDSDATA_REQUIRE_GPU is set, but {lack}", pytrace=False)
    pytest.skip(lack)
