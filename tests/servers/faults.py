"""An object store that injects faults, with delays and a byte rate for each connection.

In a test, `FaultServer()` runs in a thread of the test's process:

    with FaultServer() as server:
        url = server.make("train.bin", 10**9)          # bytes that follow from their offset
        server.plan = Plan(seed=1, share=0.1, kinds=("reset_within", "status_503"))
        ...
        assert bytes_read == server.content("train.bin", offset, length)
        assert server.counts()["ranges"] == 12

As a process of its own (the bench, or a server that is far):

    python tests/servers/faults.py --port 9000 --delay-ms 50 --mbit-per-s 200

which serves http://127.0.0.1:9000/bucket/made/SIZE/NAME for any SIZE and NAME, shows its counts at
/-/counts, and takes a plan by PUT /-/plan.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from servers import fault_s3
from servers.fault_content import Content
from servers.fault_http import Connection, Disconnected, Request, Response, SecureConnection
from servers.fault_kinds import APPLY, INSTEAD, Exchange, Plan, Record, apply, carried_out, expired_token

BUCKET = "bucket"
KEPT_RECORDS = 200_000


@dataclasses.dataclass
class Link:
    """How far away the server is. A connection that is paced sends `bytes_per_s`."""

    delay_s: float = 0.0  # of each request
    bytes_per_s: float = 0.0  # of each connection; 0: as fast as it can
    requests_per_connection: int = 0  # then it is closed; 0: never
    signed: bool = False  # requests without a signature are refused


class FaultServer:
    """Runs in a thread of its own until it is closed; any thread may call its methods.

    Attributes:
        plan: which faults come. It may be replaced at any time.
        link: delay and byte rate, as above.
        ended_keys: ids of access keys whose signatures are refused.
        content_: the objects. Content that is given to it stays when it is closed.
    """

    access_key, secret_key, region, bucket = "gdsdata", "a-secret-of-tests", "us-east-1", BUCKET

    def __init__(
        self,
        plan: Plan | None = None,
        link: Link | None = None,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        content: Content | None = None,
    ):
        self.plan, self.link, self.tls = plan or Plan(), link or Link(), tls
        self.content_, self.owns_content = content or Content(), content is None
        self.ended_keys: set[str] = set()
        self.records: collections.deque[Record] = collections.deque(maxlen=KEPT_RECORDS)
        self.accepted = self.open = self.most_open = 0
        self.tasks: set[asyncio.Task] = set()
        self.listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.endpoint_url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.loop = asyncio.new_event_loop()
        self.ending = asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.main(),), daemon=True)
        self.thread.start()

    # ------------------------------------------------------------------------------------------- for tests

    def url(self, key: str, scheme: str = "s3") -> str:
        """Return the object's URL of that scheme."""
        return f"{self.endpoint_url}/{BUCKET}/{key}" if scheme.startswith("http") else f"{scheme}://{BUCKET}/{key}"

    def environment(self) -> dict[str, str]:
        """Return the variables by which any S3 client finds the server."""
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint_url, "AWS_REGION": self.region}

    def make(self, key: str, size: int) -> str:
        """Make an object, or another version of it, and return its URL."""
        self.content_.make(f"{BUCKET}/{key}", size)
        return self.url(key)

    def put(self, key: str, data: bytes) -> str:
        self.content_.put(f"{BUCKET}/{key}", data)
        return self.url(key)

    def get(self, key: str) -> bytes:
        return self.content_.read(self.content_.objects[f"{BUCKET}/{key}"])

    def names(self, prefix: str = "") -> list[str]:
        names = [key.partition("/")[2] for key in list(self.content_.objects)]
        return sorted(name for name in names if name.startswith(prefix))

    def uploads(self) -> list[str]:
        """Return the keys of uploads that are neither complete nor aborted."""
        return [key.partition("/")[2] for key, _ in list(self.content_.uploads.values())]

    def content(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes that a range of the newest version has."""
        return self.content_.read(self.content_.objects[f"{BUCKET}/{key}"], offset, length)

    def fail_next(self, kind: str, count: int = 1, key: str = "") -> None:
        """Give this fault to the next requests whose key has `key` in it."""
        Plan(scripted=[(kind, key)])  # which checks the name
        self.plan.scripted += [(kind, key)] * count

    def expire_signatures(self) -> None:
        """Answer 403 to every signature that was used until now."""
        self.plan.expired_signatures |= self.seen_signatures

    def counts(self) -> dict[str, Any]:
        """Return requests, ranges, bytes, faults, and connections so far."""
        return self.in_thread(self.counted)

    def in_thread(self, function: Callable[[], Any]) -> Any:
        """Call a function between two steps of the server, and return its result."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def counted(self) -> dict[str, Any]:
        records = self.records
        return {
            "requests": len(records),
            "ranges": sum(record.offset is not None for record in records),
            "bytes": sum(record.bytes for record in records),
            "connections": self.accepted,
            "open": self.open,
            "most_open": self.most_open,
            "faults": dict(collections.Counter(record.fault for record in records if record.fault)),
            "statuses": dict(collections.Counter(str(record.status) for record in records)),
        }

    def forget(self) -> None:
        """Start the counts anew."""
        self.in_thread(self.forgotten)

    def forgotten(self) -> None:
        self.records.clear()
        self.accepted, self.most_open = self.open, self.open

    def close(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.ending.set)
            self.thread.join()
            self.listener.close()
            if self.owns_content:
                self.content_.close()
            self.loop.close()

    def __enter__(self) -> "FaultServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- the thread

    async def main(self) -> None:
        self.seen_signatures: set[str] = set()
        if self.tls:
            server = await asyncio.start_server(self.secure, sock=self.listener, ssl=self.tls)
            await self.ending.wait()
            server.close()
        else:
            accepting = asyncio.ensure_future(self.accept())
            await self.ending.wait()
            accepting.cancel()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def accept(self) -> None:
        while True:
            client, _ = await self.loop.sock_accept(self.listener)
            self.begin(Connection(client, self.content_.file, self.link.bytes_per_s))

    async def secure(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begin(SecureConnection(reader, writer, self.content_.file, self.link.bytes_per_s))

    def begin(self, connection: Connection) -> None:
        task = self.loop.create_task(self.serve(connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, connection: Connection) -> None:
        self.accepted, self.open = self.accepted + 1, self.open + 1
        self.most_open = max(self.most_open, self.open)
        number, served = self.accepted, 0
        try:
            while await self.one(connection, number):
                served += 1
                if served == self.link.requests_per_connection:
                    break
        except (Disconnected, ValueError):
            pass
        finally:
            self.open -= connection.counts
            await connection.close()

    async def one(self, connection: Connection, number: int) -> bool:
        """Answer one request; False if the connection ends."""
        request = await connection.request()
        if request.key.startswith("-/"):
            self.leave_out(connection)
            await connection.send((answer := self.about(request)).head() + answer.body)
            return True
        if self.link.delay_s:
            await asyncio.sleep(self.link.delay_s)
        refusal = self.refusal(request)
        reads = request.method in ("GET", "HEAD")
        response = refusal or (fault_s3.answer(self.content_, request) if reads else Response(200))
        fault = "" if refusal else self.plan.draw(request, lambda name: APPLY[name](request, response))
        if not (reads or refusal or fault in INSTEAD):
            response = fault_s3.answer(self.content_, request)
        record = self.record(request, response, number, fault)
        exchange = Exchange(request, response, connection, self.content_, self.plan, record)
        goes_on = await carried_out(exchange, fault)
        return goes_on and request.headers.get("connection", "").lower() != "close"

    def refusal(self, request: Request) -> Response | None:
        """Return the error for a request without a signature that is good."""
        signature = request.signature
        if signature in self.plan.expired_signatures:
            return expired_token()
        if request.access_key in self.ended_keys:
            return fault_s3.error(403, "AccessDenied")
        if signature:
            self.seen_signatures.add(signature)
        return fault_s3.error(403, "AccessDenied") if self.link.signed and not signature else None

    def record(self, request: Request, response: Response, number: int, fault: str) -> Record:
        offset = None
        if response.status == 206:
            offset = int(response.headers["Content-Range"].split()[1].partition("-")[0])
        record = Record(request.method, request.key.partition("/")[2], offset, response.length, number, fault)
        self.records.append(record)
        return record

    def leave_out(self, connection: Connection) -> None:
        """Leave a connection out of the counts, because it asks for them."""
        self.accepted, self.open = self.accepted - connection.counts, self.open - connection.counts
        connection.counts = False

    def about(self, request: Request) -> Response:
        """Answer /-/counts, /-/records, /-/plan and /-/forget."""
        asked = request.key.partition("/")[2]
        if request.method == "PUT" and asked == "plan":
            self.plan = Plan(**json.loads(request.body))
        elif asked == "forget":
            self.forgotten()
        answer: Any = [dataclasses.asdict(one) for one in self.records] if asked == "records" else self.counted()
        return Response(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())


def certificate(folder: Path, name: str = "127.0.0.1") -> tuple[ssl.SSLContext, Path]:
    """Make a certificate for a host name or an address.

    Returns:
        The server's context, and the file that clients trust.
    """
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    is_address = name.replace(".", "").isdecimal()
    host: Any = x509.IPAddress(ipaddress.ip_address(name)) if is_address else x509.DNSName(name)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([host]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{name}.pem"
    path.write_bytes(pem)
    (folder / f"{name}.key").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, folder / f"{name}.key")
    return context, path


def main() -> None:
    parser = argparse.ArgumentParser(description="An object store of made content that injects faults.")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--delay-ms", type=float, default=0, help="of each request")
    parser.add_argument("--mbit-per-s", type=float, default=0, help="of each connection; 0: as fast as it can")
    parser.add_argument("--faults", default="", help="kinds, with commas between them; all")
    parser.add_argument("--share", type=float, default=0.1, help="of requests that get a fault")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kinds = apply(filter(None, given.faults.split(",")))
    plan = Plan(given.seed, given.share if kinds else 0.0, kinds)
    link = Link(given.delay_ms / 1e3, given.mbit_per_s * 1e6 / 8)
    with FaultServer(plan, link, port=given.port) as server:
        print(server.endpoint_url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.thread.join()


if __name__ == "__main__":
    main()
