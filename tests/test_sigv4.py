"""Signatures: the examples of Amazon's documentation, and the rules of encoding.

Source of the examples: "Signature Calculations for the Authorization Header" and "Authenticating
Requests: Using Query Parameters" in the Amazon S3 API reference.
"""

from datetime import datetime, timezone
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsdata.storage import checksums, sigv4
from gdsdata.storage.secret import Keys

KEYS = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
NOW = datetime(2013, 5, 24, tzinfo=timezone.utc)
HOST = "https://examplebucket.s3.amazonaws.com"
EMPTY = {"x-amz-content-sha256": sigv4.EMPTY_SHA256}
PUT = {
    "date": "Fri, 24 May 2013 00:00:00 GMT",
    "x-amz-storage-class": "REDUCED_REDUNDANCY",
    "x-amz-content-sha256": checksums.sha256_hex(b"Welcome to Amazon S3."),
}


@pytest.mark.parametrize(
    ("method", "path", "headers", "signature"),
    [
        (
            "GET",
            "/test.txt",
            {**EMPTY, "Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            f"/{sigv4.encode_key('test$file.text')}",
            PUT,
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        ("GET", "/?lifecycle", EMPTY, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            "GET",
            f"/?{sigv4.query_of({'prefix': 'J', 'max-keys': '2'})}",
            EMPTY,
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
    ids=["get", "put", "lifecycle", "list"],
)
def test_headers_are_signed_as_the_documentation_has_it(method, path, headers, signature):
    signed = sigv4.with_headers(sigv4.AWS, method, HOST + path, headers, KEYS, "us-east-1", NOW)
    assert signed["authorization"].endswith(f"Signature={signature}")
    assert signed["host"] == "examplebucket.s3.amazonaws.com"


def test_a_query_is_signed_as_the_documentation_has_it():
    url = sigv4.with_query(sigv4.AWS, "GET", f"{HOST}/test.txt", KEYS, "us-east-1", NOW, 86400)
    values = dict(parse_qsl(urlsplit(url).query))
    assert values["X-Amz-Signature"] == "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    assert values["X-Amz-Credential"] == "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
    assert values["X-Amz-SignedHeaders"] == "host"


def test_a_session_token_is_signed():
    keys = Keys("A", "B", "a token/+=")
    signed = sigv4.with_headers(sigv4.AWS, "GET", f"{HOST}/k", EMPTY, keys, "eu-west-1", NOW)
    assert signed["x-amz-security-token"] == "a token/+="
    assert "x-amz-security-token" in signed["authorization"]
    url = sigv4.with_query(sigv4.AWS, "GET", f"{HOST}/k", keys, "eu-west-1", NOW, 60)
    assert "X-Amz-Security-Token=a%20token%2F%2B%3D&" in url


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://h.example:443", "h.example"),
        ("http://h.example:80", "h.example"),
        ("http://h.example:443", "h.example:443"),
        ("https://[::1]:443", "[::1]"),
        ("http://[::1]:9000", "[::1]:9000"),
    ],
)
def test_the_host_is_signed_as_clients_send_it_without_the_schemes_own_port(origin, host):
    signed = sigv4.with_headers(sigv4.AWS, "GET", f"{origin}/k", EMPTY, KEYS, "us-east-1", NOW)
    assert signed["host"] == host
    other = f"x://{host}"
    urls = [sigv4.with_query(sigv4.AWS, "GET", f"{one}/k", KEYS, "us-east-1", NOW, 60) for one in (origin, other)]
    assert urls[0].removeprefix(origin) == urls[1].removeprefix(other)


def test_google_has_its_own_names():
    url = sigv4.with_query(sigv4.GOOGLE, "GET", "https://storage.googleapis.com/b/k", KEYS, "auto", NOW, 60)
    values = dict(parse_qsl(urlsplit(url).query))
    assert values["X-Goog-Algorithm"] == "GOOG4-HMAC-SHA256"
    assert values["X-Goog-Credential"].endswith("/20130524/auto/storage/goog4_request")


@given(st.text())
@settings(deadline=None)
def test_an_encoded_key_is_plain_and_decodes_to_itself(key):
    try:
        key.encode()
    except UnicodeEncodeError:
        return  # half of a surrogate pair is no text
    encoded = sigv4.encode_key(key)
    assert unquote(encoded) == key
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/%")
    assert encoded.count("/") == key.count("/")


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(TEXT, TEXT))
@settings(deadline=None)
def test_a_query_decodes_to_its_values(values):
    values = {name: value for name, value in values.items() if name}
    query = sigv4.query_of(values)
    assert dict(parse_qsl(query, keep_blank_values=True)) == values
    assert query.split("&") == sorted(query.split("&"))


def test_the_signature_agrees_with_botocore_for_odd_keys():
    auth = pytest.importorskip("botocore.auth", reason="compares with botocore, which is not installed")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    now = datetime.now(timezone.utc).replace(microsecond=0)
    for key in ["a b+c", "ü/é", "x%20y", "q?&=#", "'(*)!~", "a//b"]:
        url = f"https://host.example:8443/bucket/{sigv4.encode_key(key)}?partNumber=1&uploadId=a%2Fb~"
        request = AWSRequest("PUT", url, headers={"x-amz-meta-two": " a   b "}, data=b"body")
        signer = auth.S3SigV4Auth(Credentials("A", "B", "C"), "s3", "eu-west-1")
        signer.add_auth(request)
        stamp = datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        assert abs(stamp - now).total_seconds() < 60
        sha256 = request.headers["X-Amz-Content-SHA256"]
        headers = {"x-amz-meta-two": " a   b ", "x-amz-content-sha256": sha256}
        ours = sigv4.with_headers(sigv4.AWS, "PUT", url, headers, Keys("A", "B", "C"), "eu-west-1", stamp)
        assert ours["authorization"].rpartition("=")[2] == request.headers["Authorization"].rpartition("=")[2], key


def test_the_crc32c_is_that_of_the_standard():
    assert checksums.crc32c_base64(b"123456789") == "4waSgw=="  # 0xE3069283, RFC 3720
    assert checksums.crc32c_base64(b"") == "AAAAAA=="
