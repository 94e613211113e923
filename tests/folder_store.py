"""A store in a folder: each object is a file, which other libraries may read."""

import contextlib
import hashlib
import os
import secrets
import shutil
import threading

from gdsdata.checkpoint import open_object
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.errors import IoError
from gdsdata.storage import stores
from gdsdata.storage.store import Access, ObjectInfo

HIDDEN = ".parts"  # uploads that are not complete


class FolderStore:
    """Objects as files below a folder. It notes calls, and fails on demand.

    Args:
        folder: of the bucket.
        part_bytes: of uploads.

    Attributes:
        calls: what was called, in order: the method and the key.
        fail: called with the method and the key before each call; it may raise or wait.
    """

    def __init__(self, folder, bucket="bucket", part_bytes=1 << 20):
        self.folder, self.bucket, self.part_bytes = str(folder), bucket, part_bytes
        self.calls = []
        self.fail = lambda method, key: None
        self.most_at_a_time = self.at_a_time = 0
        self.lock = threading.Lock()
        os.makedirs(os.path.join(self.folder, HIDDEN), exist_ok=True)

    def path(self, key):
        return os.path.join(self.folder, key)

    def names(self):
        """Return the keys of all objects."""
        found = []
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name != HIDDEN]
            found += [os.path.relpath(os.path.join(folder, name), self.folder) for name in names]
        return sorted(found)

    def unfinished(self):
        """Return the uploads that were neither completed nor aborted."""
        return os.listdir(os.path.join(self.folder, HIDDEN))

    def begin(self, method, key):
        self.calls.append((method, key))
        self.fail(method, key)

    def info(self, key):
        path = self.path(key)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except (FileNotFoundError, IsADirectoryError):
            raise FileNotFoundError(f"s3://{self.bucket}/{key}: 404") from None
        return ObjectInfo(f"s3://{self.bucket}/{key}", len(content), hashlib.md5(content).hexdigest())

    def list(self, prefix, delimiter=""):
        assert not delimiter
        self.begin("list", prefix)
        for key in self.names():
            if key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    yield self.info(key)

    def head(self, key):
        self.begin("head", key)
        return self.info(key)

    def access(self, key):
        return Access(f"file://{self.path(key)}")

    def put(self, key, body):
        self.begin("put", key)
        self.appear(key, bytes(body))
        return self.info(key)

    def appear(self, key, content):
        made = os.path.join(self.folder, HIDDEN, f"put-{secrets.token_hex(8)}")
        with open(made, "wb") as file:
            file.write(content)
        os.makedirs(os.path.dirname(self.path(key)), exist_ok=True)
        os.replace(made, self.path(key))

    def upload(self, key, size_bytes):
        self.begin("upload", key)
        return FolderUpload(self, key, size_bytes)

    def delete(self, keys):
        for key in list(keys):
            self.begin("delete", key)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(key))


class FolderUpload:
    def __init__(self, store, key, size_bytes):
        self.store, self.key, self.size_bytes, self.part_bytes = store, key, size_bytes, store.part_bytes
        self.id = os.path.join(store.folder, HIDDEN, secrets.token_hex(8))
        os.mkdir(self.id)

    def send(self, number, body):
        with self.store.lock:
            self.store.at_a_time += 1
            self.store.most_at_a_time = max(self.store.most_at_a_time, self.store.at_a_time)
        try:
            self.store.begin("send", self.key)
            count = -(-self.size_bytes // self.part_bytes)
            whole = self.part_bytes if number < count - 1 else self.size_bytes - number * self.part_bytes
            assert 0 <= number < count and body.nbytes == whole, "a part has another size"
            with open(os.path.join(self.id, str(number)), "xb") as file:
                file.write(body)
        finally:
            with self.store.lock:
                self.store.at_a_time -= 1

    def complete(self):
        self.store.begin("complete", self.key)
        numbers = sorted(map(int, os.listdir(self.id)))
        content = b""
        for number in numbers:
            with open(os.path.join(self.id, str(number)), "rb") as file:
                content += file.read()
        assert len(content) == self.size_bytes, "parts are missing"
        self.store.appear(self.key, content)
        shutil.rmtree(self.id)
        return self.store.info(self.key)

    def abort(self):
        self.store.calls.append(("abort", self.key))
        shutil.rmtree(self.id, ignore_errors=True)


def install(store):
    """Have this process use a store for s3://bucket/..., and open its objects as files."""
    stores._stores["s3", store.bucket] = store
    open_object.OpenObject = lambda url: OpenFile(store.path(url.removeprefix(f"s3://{store.bucket}/")))
    return store


def refuse(*methods, after=0, error=None):
    """Return a `FolderStore.fail` that fails calls of these methods, but for the first ones."""
    left = [after]

    def fail(method, key):
        if method in methods:
            if left[0] > 0:
                left[0] -= 1
            else:
                raise error or IoError(5, f"s3://bucket/{key}: {method}: 503")

    return fail
