"""The fault server as a process of its own, whose content outlives restarts and stays small.

    python -m long_runs.store PORT

It prints its address, and then obeys lines on stdin: `restart SECONDS` ends all connections and
refuses new ones for so long. It ends with stdin.
"""

import contextlib
import ctypes
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from servers.fault_content import Content
from servers.fault_http import Request, Response
from servers.fault_kinds import expired_token
from servers.faults import BUCKET, FaultServer

# Readers of an old version have its bytes for so long.
GRACE_S = 30.0
ENDS = "ends-at-"
PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
TESTS = Path(__file__).resolve().parents[1]


class BoundedContent(Content):
    """Content that frees the bytes of versions that are gone, after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.kept: dict[int, int] = {}  # lengths by offset
        self.gone: dict[int, float] = {}  # since when, by offset

    def keep(self, data: bytes) -> int:
        at = super().keep(data)
        self.kept[at] = len(data)
        self.free()
        return at

    def free(self) -> None:
        used = {found.at for found in self.objects.values()}
        used |= {part.at for _, parts in self.uploads.values() for part in parts.values()}
        now = time.monotonic()
        for at in list(self.kept):
            if at in used:
                self.gone.pop(at, None)
            elif now - self.gone.setdefault(at, now) > GRACE_S:
                length = ctypes.c_long(self.kept.pop(at))
                self.libc.fallocate(self.file, PUNCH_HOLE, ctypes.c_long(at), length)
                del self.gone[at]


class KeysEnd(FaultServer):
    """Refuses access keys whose id says that they have ended: see `key_until`."""

    def refusal(self, request: Request) -> Response | None:
        ends = request.access_key.removeprefix(ENDS)
        if ends != request.access_key and time.time() > float(ends):
            return expired_token()
        return super().refusal(request)


def key_until(ends: float) -> str:
    """Return the id of an access key that the store refuses from then on."""
    return f"{ENDS}{ends:.3f}"


def main() -> None:
    content, port = BoundedContent(), int(sys.argv[1])
    server = KeysEnd(port=port, content=content)
    print(server.endpoint_url, flush=True)
    for line in sys.stdin:
        word, seconds = line.split()
        assert word == "restart", line
        plan, port = server.plan, server.port
        server.close()
        time.sleep(float(seconds))
        server = KeysEnd(plan, port=port, content=content)
        print("restarted", flush=True)
    server.close()


class Store:
    """The process of the server, as seen from the one that started it."""

    def __init__(self, port: int = 0) -> None:
        paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "long_runs.store", str(port)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint_url = self.process.stdout.readline().strip()
        self.restarting = threading.Lock()

    def restart(self, down_s: float) -> None:
        """End the server, and start it again on the same port `down_s` seconds later."""
        with self.restarting:
            self.process.stdin.write(f"restart {down_s}\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "restarted\n", "the store has ended"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(30)

    def environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": FaultServer.access_key, "AWS_SECRET_ACCESS_KEY": FaultServer.secret_key}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint_url, "AWS_REGION": FaultServer.region}


class Client:
    """Requests to the server that use nothing of gdsdata, and are repeated until they succeed."""

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url

    def url(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def put(self, key: str, data: bytes) -> None:
        self.ask("PUT", f"{BUCKET}/{key}", data)

    def set_plan(self, **plan: object) -> None:
        self.ask("PUT", "-/plan", json.dumps(plan).encode())

    def counts(self) -> dict:
        return json.loads(self.ask("GET", "-/counts"))

    def ask(self, method: str, path: str, data: bytes | None = None, patience_s: float = 60) -> bytes:
        until = time.monotonic() + patience_s
        while True:
            request = urllib.request.Request(f"{self.endpoint_url}/{path}", data, method=method)
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return answer.read()
            except (OSError, ValueError, http.client.HTTPException) as error:  # faults come to these requests too
                if time.monotonic() > until:
                    raise error
                time.sleep(0.05)


if __name__ == "__main__":
    main()
