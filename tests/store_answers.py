"""A server for the tests of stores: a function that answers requests."""

import threading
from urllib.parse import parse_qsl, unquote, urlsplit

from gdsdata.storage import transport
from gdsdata.storage.stores import s3

KEYS = {"access_key_id": "id", "secret_access_key": "secret"}


class Server:
    """Answers each request by a function of (method, path, query, headers, body), and keeps it."""

    def __init__(self, monkeypatch, answer):
        self.requests = []
        self.answer = answer
        self.lock = threading.Lock()
        monkeypatch.setattr(transport, "_attempt", self.attempt)
        monkeypatch.setattr(transport, "_sleep", lambda seconds: None)

    def attempt(self, method, url, headers, body, timeout_s, most_bytes):
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        with self.lock:
            self.requests.append((method, url, dict(headers), bytes(body)))
            answer = self.answer(method, unquote(parts.path), query, headers, bytes(body))
        status, headers, body = (200, {}, answer) if isinstance(answer, bytes) else answer
        return status, headers, body[: most_bytes + 1]


def serving(monkeypatch):
    """Return a function that starts a `Server`, in an environment that names none."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    return lambda answer: Server(monkeypatch, answer)


def s3_store(bucket="bucket", **options):
    return s3.make(bucket, "s3", {"credentials": KEYS, "region": "eu-west-1", **options})


def no_request(*_):
    raise AssertionError("no request should be sent")
