"""Objects of a store, which the bench puts, lists and signs by botocore, never by gdsdata."""

import contextlib
import os
import shutil
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdsdata.bench.data.made import DataError, keep

LIFETIME_S = 6 * 3600  # of signed URLs


class Piece(NamedTuple):
    key: str
    offset: int
    length: int

    @property
    def range(self):
        """Return the value of the header `Range`."""
        return f"bytes={self.offset}-{self.offset + self.length - 1}"


@dataclass(frozen=True)
class Access:
    """How any client reaches a bucket. It is never written to results.json."""

    endpoint_url: str  # "" is AWS
    access_key: str
    secret_key: str = field(repr=False)
    token: str = field(repr=False)
    region: str
    bucket: str

    def client(self, **options):
        import botocore.config
        import botocore.session

        style = {"addressing_style": "path" if self.endpoint_url else "virtual"}
        config = botocore.config.Config(signature_version="s3v4", s3=style, **options)
        return botocore.session.Session().create_client(
            "s3", endpoint_url=self.endpoint_url or None, aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key, aws_session_token=self.token or None, region_name=self.region,
            config=config,
        )  # fmt: skip

    def signed_urls(self, keys, action="get_object"):
        """Return {key: URL that anyone may GET, or with "put_object" PUT}."""
        client = self.client()
        return {
            key: client.generate_presigned_url(action, {"Bucket": self.bucket, "Key": key}, LIFETIME_S) for key in keys
        }

    def environment(self):
        """Return the variables by which S3 clients find the store."""
        found = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": self.token,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return {name: value for name, value in found.items() if value}


def own_access(bucket, endpoint_url):
    """Return the Access of the user's own credentials, as botocore finds them."""
    import botocore.session

    session = botocore.session.Session()
    credentials = session.get_credentials()
    if credentials is None:
        raise DataError(f"s3://{bucket}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    frozen = credentials.get_frozen_credentials()
    endpoint_url = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
    return Access(endpoint_url, frozen.access_key, frozen.secret_key, frozen.token or "", region, bucket)


@dataclass
class Objects:
    """Objects with their sizes, and the local files that they were put from, if they were."""

    access: Access
    keys: list[str]
    sizes: list[int]
    files: list[str]
    origin: str

    @property
    def file_bytes(self):
        return sum(self.sizes)

    @property
    def urls(self):
        return [f"s3://{self.access.bucket}/{key}" for key in self.keys]

    def summary(self):
        return f"{self.file_bytes / 2**20:,.0f} MiB in {len(self.keys):,} object(s); {self.origin}"

    def pieces(self, length):
        """Return every whole range of `length` bytes, in order."""
        return [
            Piece(key, offset, length)
            for key, size in zip(self.keys, self.sizes, strict=True)
            for offset in range(0, size - length + 1, length)
        ]

    def whole(self):
        return [Piece(key, 0, size) for key, size in zip(self.keys, self.sizes, strict=True)]


class Truth:
    """The right bytes of pieces: of the local file, or fetched by botocore."""

    def __init__(self, objects):
        self.objects = objects
        pairs = zip(objects.keys, objects.files, strict=False)  # there are no files of a user's own objects
        self.maps = {key: np.memmap(file, np.uint8, "r") for key, file in pairs}
        self.client: Any = None if self.maps else objects.access.client()

    def of(self, piece):
        if piece.key in self.maps:
            return self.maps[piece.key][piece.offset : piece.offset + piece.length]
        answer = self.client.get_object(Bucket=self.objects.access.bucket, Key=piece.key, Range=piece.range)
        return np.frombuffer(answer["Body"].read(), np.uint8)


def made_files(folder, size_bytes, count, seed, progress=lambda count: None):
    """Return the paths of `count` files of random bytes, made once."""
    size = size_bytes // count

    def write(target):
        target.mkdir()
        for place in range(count):
            generator = np.random.Generator(np.random.SFC64([seed, place]))
            with open(target / f"{place:06}.bin", "wb") as out:
                for at in range(0, size, 2**24):
                    out.write(generator.bytes(min(2**24, size - at)))
            progress(size)

    parameters = {"kind": "objects", "sizes": [size] * count, "seed": seed}
    made = keep(folder, f"objects-{count}-of-{size}-{seed}", parameters, size_bytes, write)
    return sorted(str(path) for path in made.iterdir())


def put_files(access, prefix, files, progress=lambda count: None):
    """Put files under a prefix, and return them as Objects."""
    client = access.client()
    keys = [f"{prefix}/{Path(file).name}" for file in files]
    for key, file in zip(keys, files, strict=True):
        with open(file, "rb") as content:
            client.put_object(Bucket=access.bucket, Key=key, Body=content)
        progress(os.path.getsize(file))
    return Objects(access, keys, [os.path.getsize(file) for file in files], files, "put by botocore")


def listed(access, prefix):
    """Return the Objects under a prefix that have bytes.

    Raises:
        DataError: there are none.
    """
    pages = access.client().get_paginator("list_objects_v2").paginate(Bucket=access.bucket, Prefix=prefix)
    found = [(one["Key"], one["Size"]) for page in pages for one in page.get("Contents", []) if one["Size"]]
    if not found:
        raise DataError(f"data.path=s3://{access.bucket}/{prefix}: no objects there")
    keys, sizes = (list(part) for part in zip(*found, strict=True))
    return Objects(access, keys, sizes, [], f"your own: s3://{access.bucket}/{prefix}")


def fetched(access, url, folder):
    """Copy an object, or those of a folder, below a folder here; return where it is then."""
    _, name = bucket_and_prefix(url)
    client, target = access.client(), Path(folder) / Path(name).name
    for key in listed(access, name).keys:
        path = Path(f"{target}{key.removeprefix(name)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            shutil.copyfileobj(client.get_object(Bucket=access.bucket, Key=key)["Body"], out, 2**20)
    return str(target)


def delete(access, url):
    """Delete an object, or those of a folder, if there are any."""
    _, name = bucket_and_prefix(url)
    with contextlib.suppress(DataError):
        for key in listed(access, name).keys:
            access.client().delete_object(Bucket=access.bucket, Key=key)


def bucket_and_prefix(url):
    """Return both parts of s3://BUCKET/PREFIX."""
    parts = urllib.parse.urlsplit(url)
    return parts.netloc, parts.path.lstrip("/")
