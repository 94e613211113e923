"""The servers as pytest fixtures: one of each for a session, or for a worker of pytest-xdist."""

import contextlib
import importlib
from collections.abc import Iterator

import pytest

from servers.common import NotAvailable, Server


def fixture_of(name: str):
    """Make the fixture of the server in the module `servers.NAME`."""

    @pytest.fixture(scope="session", name=name)
    def server(tmp_path_factory) -> Iterator[Server]:
        module = importlib.import_module(f"servers.{name}")  # which imports NumPy: not for every test
        with contextlib.ExitStack() as opened:
            try:
                started = opened.enter_context(module.running(tmp_path_factory.mktemp(name)))
            except NotAvailable as reason:
                pytest.skip(str(reason))
            yield started

    return server


azurite, gcs, rclone, seaweedfs = map(fixture_of, ("azurite", "gcs", "rclone", "seaweedfs"))
