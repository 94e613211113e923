"""A small HTTP server of objects in memory, and the store that lists them."""

import contextlib
import hashlib
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from gdsdata import _engine
from gdsdata.storage import objects, stores
from gdsdata.storage.location import Location
from gdsdata.storage.store import Access, ObjectInfo


class ObjectServer:
    """Objects of one bucket, by their keys. It counts what is asked for.

    Attributes:
        content: bytes by key; change it at any time.
        requests: method, key, and begin and end of the range, in order.
        has_tags: answers have an ETag and Last-Modified.
        lists, heads: how often the store was asked.
    """

    def __init__(self, bucket="bucket"):
        self.bucket, self.content = bucket, {}
        self.requests, self.lists, self.heads = [], 0, 0
        self.has_tags = True
        self._tags = {}  # by the key: the content that was hashed, and its tag
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self.http = Server(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def url(self, key=""):
        return f"s3://{self.bucket}/{key}"

    def put_folder(self, folder, prefix=""):
        """Put all files below a folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.content[prefix + path.relative_to(folder).as_posix()] = path.read_bytes()

    def tag(self, key):
        data = self.content[key]
        hashed, tag = self._tags.get(key, (None, ""))
        if hashed is not data or not isinstance(data, bytes):
            tag = f'"{hashlib.md5(data).hexdigest()}"'
            self._tags[key] = data, tag
        return tag

    def answer(self, request):
        key = unquote(request.path.partition("?")[0]).removeprefix(f"/{self.bucket}/")
        data = self.content.get(key)
        begin, end, status = 0, len(data or b""), 200
        if data is None:
            status, data, end = 404, b"", 0
        elif (wanted := request.headers.get("If-Match")) and wanted != self.tag(key):
            status, data, end = 412, b"", 0
        elif said := request.headers.get("Range"):
            first, _, last = said.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1 if last else len(data), len(data)), 206
        self.requests.append((request.command, key, begin, end))
        request.send_response(status)
        if key in self.content and self.has_tags:
            request.send_header("ETag", self.tag(key))
            request.send_header("Last-Modified", formatdate(usegmt=True))
        if status == 206:
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        request.send_header("Content-Length", str(end - begin))
        request.end_headers()
        if request.command == "GET":
            with contextlib.suppress(ConnectionError):  # the client needs no more of it
                request.wfile.write(data[begin:end])

    # ------------------------------------------------------------------------------------------- as a `Store`

    def info(self, key):
        return ObjectInfo(self.url(key), len(self.content[key]), self.tag(key))

    def list(self, prefix, delimiter=""):
        self.lists += 1
        folders = set()
        for key in sorted(self.content):
            if key.startswith(prefix):
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    folder = prefix + rest.partition(delimiter)[0] + delimiter
                    if folder not in folders:
                        folders.add(folder)
                        yield folder
                else:
                    yield self.info(key)

    def head(self, key):
        self.heads += 1
        if key not in self.content:
            raise FileNotFoundError(2, "no such object", self.url(key))
        return self.info(key)

    def access(self, key):
        return Access(f"{self.address}/{self.bucket}/{key}")

    def doubt_secret(self, age_s):
        pass


@contextlib.contextmanager
def serving(monkeypatch, bucket="bucket"):
    """Start a server, which is then the store of its bucket."""
    server = ObjectServer(bucket)
    _engine.configure_http(hedge=False)  # requests are counted
    try:
        monkeypatch.setitem(stores._stores, ("s3", bucket), server)
        assert stores.store_of(server.url("a")) == (server, Location("s3", bucket, "a"))
        yield server
    finally:
        server.close()
        objects.forget("s3://")
        _engine.configure_http()
