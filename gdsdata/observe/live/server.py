"""The live view as a page, and its numbers for Prometheus: `--serve`.

Read only. It answers requests for the address that it was given and for no other name, so a page of
another site cannot read it by a name that leads here (DNS rebinding).
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from gdsdata.observe.live import metrics, sections
from gdsdata.observe.live.rates import Sampler, View

_PAGE = Path(__file__).with_name("page.html")
_REQUEST_S = 10.0  # a client that sends its request no faster is left
_LOOPBACK_NAMES = ("localhost",)
_USUAL_PORT = 80  # of http: clients leave it out of the Host header


class Server(ThreadingHTTPServer):
    """Serves the page at ``/``, its numbers at ``/view.json``, and ``/metrics``.

    Args:
        address: an IP address of this machine.
        port: 0: any that is free.
        sampler: takes the views.

    Raises:
        OSError: the address or the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, address: str, port: int, sampler: Sampler) -> None:
        self.sampler = sampler
        self.page = _PAGE.read_bytes()
        self.policy = _policy(self.page.decode())
        if ":" in address:
            self.address_family = socket.AF_INET6
        super().__init__((address, port), _Handler)
        self.url = f"http://{_in_url(address)}:{self.server_port}/"
        names = [_in_url(address)]
        if ipaddress.ip_address(address).is_loopback:
            names += _LOOPBACK_NAMES
        # An unspecified address is reached by many, so any IP address is one of this machine's.
        self.takes_any_address = ipaddress.ip_address(address).is_unspecified
        self.names = frozenset(names)

    def is_for_here(self, host: str) -> bool:
        """Return whether a request's Host header names this server."""
        name = host.lower().removesuffix(f":{self.server_port}")
        if name in self.names and (name != host.lower() or self.server_port == _USUAL_PORT):
            return True
        return self.takes_any_address and re.fullmatch(r"([\d.]+|\[[\da-fA-F:]+\])(:\d+)?", host) is not None


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gdsdata", ""
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        if not self.server.is_for_here(self.headers.get("Host", "")):
            return self._send(421, "text/plain", b"this server has another name: use the URL that it printed\n")
        path = urlsplit(self.path).path
        if path == "/":
            return self._send(200, "text/html; charset=utf-8", self.server.page)
        if path == "/view.json":
            return self._send(200, "application/json", json.dumps(_shown(self.server.sampler.view())).encode())
        if path == "/metrics":
            return self._send(200, metrics.CONTENT_TYPE, metrics.text(self.server.sampler.answers()).encode())
        return self._send(404, "text/plain", b"there are /, /view.json and /metrics\n")

    do_HEAD = do_GET

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a page asks every second."""


_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _shown(view: View) -> dict[str, Any]:
    """Return a view with the tables that the terminal shows."""
    tables = [{**one._asdict(), "left": one.is_left} for one in sections.sections(view)]
    return {**view, "sections": tables, "nobody": sections.nobody(view)}


def _policy(page: str) -> str:
    """Return the policy under which a browser runs the page's own script and styles alone."""

    def hashed(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found)
        return " ".join(f"'sha256-{one}'" for one in digests)

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def parsed(where: str) -> tuple[str, int]:
    """Return address and port of "127.0.0.1:8000", "[::1]:8000" or "8000".

    Raises:
        ValueError: it is no such text, or a name.
    """
    found = re.fullmatch(r"(?:\[([^\]]+)\]:|([^:\[\]]+):)?(\d{1,5})", where)
    if found is None or int(found[3]) > 65535:
        raise ValueError(f"--serve {where}: write it as 127.0.0.1:8000")
    address = found[1] or found[2] or "127.0.0.1"
    if address == "localhost":
        address = "127.0.0.1"
    try:
        address = str(ipaddress.ip_address(address))  # in its short form, as browsers write it
    except ValueError:
        raise ValueError(f"--serve {where}: give an IP address of this machine, not a name") from None
    return address, int(found[3])


def serve(where: str, sampler: Sampler, allow_remote: bool, refuse: Callable[[str], NoReturn]) -> int:
    """Serve until Ctrl-C, and return the exit status.

    Args:
        where: address and port.
        sampler: takes the views.
        allow_remote: the address may be one that other machines reach.
        refuse: ends the program because of a wrong argument.
    """
    try:
        address, port = parsed(where)
    except ValueError as error:
        refuse(str(error))
    if not ipaddress.ip_address(address).is_loopback:
        if not allow_remote:
            refuse(f"--serve {where}: other machines reach this address; give --allow-remote if they may")
        print(
            f"gdsdata.top: anyone who reaches {address} can read these numbers and the names of folders; nothing is "
            "encrypted",
            file=sys.stderr,
        )
    try:
        server = Server(address, port, sampler)
    except OSError as error:
        print(f"gdsdata.top: {where} cannot be served: {error}", file=sys.stderr)
        return 1
    print(f"{server.url}  (for Prometheus: {server.url}metrics)", flush=True)
    with server:
        server.serve_forever(poll_interval=0.2)
    return 0
