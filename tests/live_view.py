"""Parts that the tests of `gdsdata.top` share: the folder of the sockets, and snapshots."""

import os

import numpy as np

from gdsdata.observe import live
from gdsdata.observe.live import client, folder


def own_sockets(tmp_path, monkeypatch):
    """Yield the folder of the sockets, for one test alone, and end the export after it."""
    (tmp_path / "run").mkdir(mode=0o700)
    path = tmp_path / "run" / "gdsdata"
    monkeypatch.setattr(folder, "places", lambda: [str(path)])
    yield path
    live.stop()


def write_samples(path, count=40):
    path.mkdir()
    for i in range(count):
        np.save(path / f"{i:03}.npy", np.full(100, i, np.float32))
    return path


def own():
    """Return the snapshot of this process, by its socket."""
    (snapshot,) = client.ask(os.getpid()).snapshots
    return snapshot


def data_set_of(snapshot, path):
    (found,) = (one for one in snapshot["data_sets"] if one["source"].startswith(str(path)))
    return found
