"""Checksums that go with a body, so that the server verifies what arrived."""

from __future__ import annotations

import base64
import hashlib

import numpy as np

from gdsdata.io.engine import crc32c_of_rows


def crc32c_base64(body: bytes | memoryview) -> str:
    """Return the CRC-32C of ``body``, big-endian, in base64: as S3 and GCS write it."""
    rows = np.frombuffer(body, np.uint8).reshape(1, -1)
    value = int(crc32c_of_rows(rows)[0]) if len(rows[0]) else 0
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def md5_base64(body: bytes | memoryview) -> str:
    """Return the MD5 of ``body`` in base64, as Content-MD5 has it."""
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def sha256_hex(body: bytes | memoryview) -> str:
    """Return the SHA-256 of ``body`` in hex."""
    return hashlib.sha256(body).hexdigest()
