"""Content of the fault server: made bytes, which follow from key and offset, and kept ones.

All of it lies in one file in memory, so that `sendfile` sends it. Made content is a fixed pattern
of a prime length, which starts at a place that key and version choose. So bytes of another offset,
object or version are other bytes, unless the offset is wrong by a multiple of that prime.
"""

import functools
import hashlib
import os
import time
from dataclasses import dataclass, field

PERIOD = 2**24 - 3
Piece = tuple[int, int]  # offset in the file, and length


@functools.cache
def pattern() -> bytes:
    return hashlib.shake_128(b"made content").digest(PERIOD)


def start_of(key: str, version: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{key}\0{version}".encode(), digest_size=8).digest(), "big") % PERIOD


def made(key: str, offset: int, length: int, version: int = 1) -> bytes:
    """Return the bytes that a made object has, whose key begins with its bucket."""
    return b"".join(pattern()[at : at + count] for at, count in made_pieces(key, offset, length, version))


def made_pieces(key: str, offset: int, length: int, version: int) -> list[Piece]:
    at, pieces = (start_of(key, version) + offset) % PERIOD, []
    while length:
        count = min(length, PERIOD - at)
        pieces.append((at, count))
        at, length = 0, length - count
    return pieces


@dataclass(frozen=True)
class Object:
    """One version of an object; `at` is where its bytes are kept, and None if they are made."""

    key: str
    size: int
    version: int
    etag: str
    at: int | None = None
    modified: float = field(default_factory=time.time)

    def pieces(self, offset: int, length: int) -> list[Piece]:
        length = max(0, min(length, self.size - offset))
        if self.at is None:
            return made_pieces(self.key, offset, length, self.version)
        return [(self.at + offset, length)] if length else []


class Content:
    """The file in memory, the objects by key, and the uploads that are under way."""

    def __init__(self) -> None:
        self.file = os.memfd_create("content")
        self.end = os.write(self.file, pattern())
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, tuple[str, dict[int, Object]]] = {}
        self.completed: dict[str, Object] = {}  # by upload

    def close(self) -> None:
        os.close(self.file)

    def keep(self, data: bytes) -> int:
        """Return where the bytes are kept, for good."""
        at = self.end
        for done in range(0, len(data), 2**30):
            os.pwrite(self.file, memoryview(data)[done : done + 2**30], at + done)
        self.end += len(data)
        return at

    def next_version(self, key: str) -> int:
        return self.objects[key].version + 1 if key in self.objects else 1

    def make(self, key: str, size: int) -> Object:
        """Make an object, or the next version of it."""
        version = self.next_version(key)
        etag = hashlib.md5(f"{key}\0{version}".encode()).hexdigest()
        self.objects[key] = Object(key, size, version, etag)
        return self.objects[key]

    def put(self, key: str, data: bytes) -> Object:
        etag = hashlib.md5(data).hexdigest()
        self.objects[key] = Object(key, len(data), self.next_version(key), etag, self.keep(data))
        return self.objects[key]

    def find(self, key: str) -> Object | None:
        """Return the object. BUCKET/made/SIZE/NAME is made when it is asked for."""
        parts = key.split("/")
        if key not in self.objects and parts[1:2] == ["made"] and parts[2].isdecimal():
            self.make(key, int(parts[2]))
        return self.objects.get(key)

    def read(self, found: Object, offset: int = 0, length: int | None = None) -> bytes:
        length = found.size if length is None else length
        return b"".join(os.pread(self.file, count, at) for at, count in found.pieces(offset, length))

    # ------------------------------------------------------------------------------------------- uploads

    def begin_upload(self, key: str) -> str:
        upload = f"upload-{len(self.uploads) + len(self.completed) + 1}-{os.urandom(4).hex()}"
        self.uploads[upload] = (key, {})
        return upload

    def put_part(self, upload: str, number: int, data: bytes) -> Object:
        key, parts = self.uploads[upload]
        parts[number] = Object(key, len(data), number, hashlib.md5(data).hexdigest(), self.keep(data))
        return parts[number]

    def complete(self, upload: str, named: list[tuple[int, str]]) -> Object:
        """Put the named parts together, which are numbers and ETags.

        Raises:
            KeyError: there is no such upload.
            ValueError: a part is missing, has another ETag, or is out of order.
        """
        if upload in self.completed:  # as S3, which may have lost the first answer
            return self.completed[upload]
        key, parts = self.uploads[upload]
        numbers = [number for number, _ in named]
        if not named or numbers != sorted(set(numbers)):
            raise ValueError("InvalidPartOrder")
        if any(number not in parts or parts[number].etag != etag for number, etag in named):
            raise ValueError("InvalidPart")
        found = self.put(key, b"".join(self.read(parts[number]) for number in numbers))
        digests = hashlib.md5(b"".join(bytes.fromhex(parts[number].etag) for number in numbers)).hexdigest()
        self.objects[key] = Object(key, found.size, found.version, f"{digests}-{len(numbers)}", found.at)
        del self.uploads[upload]
        self.completed[upload] = self.objects[key]
        return self.objects[key]
