"""An object store that runs, and how a test fills it without gdsdata."""

import functools
import socket
from dataclasses import dataclass
from typing import Any


class NotAvailable(Exception):
    """A server cannot be started here, and this is the reason."""


@dataclass(frozen=True)
class Server:
    """An object store on the loopback interface.

    Its methods use botocore, or what each server's own class names, and never gdsdata.
    """

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    pid: int
    region: str = "us-east-1"
    scheme: str = "s3"

    def url(self, key: str) -> str:
        return f"{self.scheme}://{self.bucket}/{key}"

    def environment(self) -> dict[str, str]:
        """Return the variables by which any S3 client finds the server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @functools.cached_property
    def client(self) -> Any:
        """Return botocore's S3 client, which one thread may use."""
        import botocore.config
        import botocore.session

        options = botocore.config.Config(
            signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 5}
        )
        return botocore.session.Session().create_client(
            "s3", endpoint_url=self.endpoint_url, aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key, region_name=self.region, config=options,
        )  # fmt: skip

    def put(self, key: str, content: bytes) -> str:
        """Store an object, and return its URL."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=content)
        return self.url(key)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=key)

    def uploads(self) -> list[str]:
        """Return the keys of multipart uploads that are neither complete nor aborted."""
        return [one["Key"] for one in self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])]


def listens(server: Server) -> bool:
    """Return whether something listens at the server's address."""
    host, _, port = server.endpoint_url.rpartition("//")[2].partition("/")[0].partition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True
