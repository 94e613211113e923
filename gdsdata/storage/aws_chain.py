"""Where AWS's tools find settings and keys: the environment, shared files, and botocore's chain.

Source: "Standardized credential providers" and "Shared config and credentials files" in the AWS
SDKs and Tools Reference Guide.
"""

from __future__ import annotations

import configparser
import functools
import importlib
import json
import math
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdsdata.fork_safe import forks_wait
from gdsdata.storage.credentials import end_of
from gdsdata.storage.options import is_true
from gdsdata.storage.secret import Keys, Secret

_PROCESS_S = 60
# botocore renews temporary keys by itself, so that they are valid for ten minutes at least.
_BOTOCORE_LIFE_S = 600.0
_READ_AGAIN_S = 900.0
# A profile with one of these takes its keys from a service, which botocore asks.
_OF_BOTOCORE = ("role_arn", "sso_session", "sso_start_url", "web_identity_token_file", "login_session")
_SERVICES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class Profile:
    """The settings of a profile, from both files.

    Attributes:
        values: may be secret.
        endpoint_url: of S3, or "".
    """

    name: str
    values: dict[str, str] = field(repr=False)
    endpoint_url: str = ""

    @property
    def region(self) -> str:
        """Its region, or ""."""
        return self.values.get("region", "")

    @property
    def addressing_style(self) -> str:
        """How S3's buckets are addressed, or ""."""
        return _nested(self.values.get("s3", ""), "addressing_style")


def read_profile(name: str | None = None) -> Profile:
    """Return a profile: ``name``, that of AWS_PROFILE, or "default". An empty one if there is none.

    Raises:
        ValueError: a profile that was named does not exist, or a file is damaged.
    """
    wanted = name or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or ""
    profile = wanted or "default"
    config = _by_plain_name(_parsed("AWS_CONFIG_FILE", "~/.aws/config"))
    secrets = _parsed("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    sections = [f"profile {profile}"] if profile != "default" else ["default", "profile default"]
    found = [config[one] for one in sections if one in config] + ([secrets[profile]] if profile in secrets else [])
    if wanted and not found:
        raise ValueError(f"there is no AWS profile {wanted!r}: write it to ~/.aws/config, or unset AWS_PROFILE")
    values = {key: value.strip() for one in found for key, value in one.items()}
    return Profile(profile, values, _endpoint_of(config, values))


def endpoint_of(profile: Profile) -> tuple[str, str]:
    """Return the endpoint for S3 of environment or profile, and what names it; or "" twice."""
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    if is_true(profile.values.get("ignore_configured_endpoint_urls") if ignored is None else ignored):
        return "", ""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name], name
    return profile.endpoint_url, f"endpoint_url of the profile {profile.name}"


def region_of(profile: Profile) -> str:
    """Return the region that environment or profile name, or ""."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or profile.region


def find_keys(profile_name: str | None, url: str) -> Secret:
    """Return the first keys of AWS's chain.

    Args:
        profile_name: prefer this profile to the environment's keys.
        url: of the bucket, for messages.

    Raises:
        PermissionError: there are none.
        ValueError: the profile or a file is wrong.
    """
    if not profile_name and (keys := _keys_of_environment()):
        return keys
    profile = read_profile(profile_name)
    values = profile.values
    is_of_service = any(name in values for name in _OF_BOTOCORE) or any(name in os.environ for name in _SERVICES)
    if not is_of_service:
        if values.get("aws_access_key_id") and values.get("aws_secret_access_key"):
            return _of_text(
                values["aws_access_key_id"],
                values["aws_secret_access_key"],
                values.get("aws_session_token", ""),
                f"the AWS profile {profile.name}",
            )
        if values.get("credential_process"):
            return _keys_of_process(values["credential_process"], profile.name)
    return _keys_of_botocore(profile_name, url)


def _keys_of_environment() -> Keys | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    token, ends = os.environ.get("AWS_SESSION_TOKEN", ""), os.environ.get("AWS_CREDENTIAL_EXPIRATION")
    source = "AWS_ACCESS_KEY_ID in the environment"
    return (
        Keys(key, secret, token, expires_at=end_of(ends, "AWS_CREDENTIAL_EXPIRATION"), source=source)
        if ends
        else _of_text(key, secret, token, source)
    )


def _of_text(key: str, secret: str, token: str, source: str) -> Keys:
    """Return keys that do not say when they end.

    Temporary ones are read again soon, because other programs renew them.
    """
    expires_at = time.time() + _READ_AGAIN_S if token else math.inf
    return Keys(key, secret, token, expires_at=expires_at, source=source)


def _keys_of_process(command: str, profile: str) -> Keys:
    """Return the keys that a program prints: see "Process credential provider" of AWS."""
    failed = f"credential_process of the AWS profile {profile}"
    try:
        ran = subprocess.run(shlex.split(command), capture_output=True, timeout=_PROCESS_S, check=True)
        said = json.loads(ran.stdout)
        return Keys(
            said["AccessKeyId"],
            said["SecretAccessKey"],
            said.get("SessionToken") or "",
            expires_at=end_of(said.get("Expiration")),
            source=failed,
        )
    except subprocess.CalledProcessError as error:
        raise PermissionError(f"{failed} ended with status {error.returncode}: run it by hand") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PermissionError(f"{failed} could not be run ({type(error).__name__}): check its path") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # its output may have secrets: not shown
        raise PermissionError(f"{failed} printed no JSON with AccessKeyId and SecretAccessKey") from None


@functools.lru_cache(maxsize=8)
def _botocore_credentials(profile_name: str | None) -> Any:
    with forks_wait():
        session = importlib.import_module("botocore.session")
        return session.Session(profile=profile_name).get_credentials()


def _keys_of_botocore(profile_name: str | None, url: str) -> Keys:
    _asking.add(threading.get_ident())
    try:
        return _asked_keys(profile_name, url)
    finally:
        _asking.discard(threading.get_ident())


# Threads that ask botocore. It holds a lock of its own while it renews keys, and a forked child
# would wait for that one forever.
_asking: set[int] = set()


def _ask_anew() -> None:
    if _asking:
        _asking.clear()
        _botocore_credentials.cache_clear()


os.register_at_fork(after_in_child=_ask_anew)


def _asked_keys(profile_name: str | None, url: str) -> Keys:
    try:
        found = _botocore_credentials(profile_name)
    except ImportError:
        raise PermissionError(
            f"{url}: no credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
            'run pip install "gdsdata[s3]" for roles, SSO and instance metadata; '
            'or set credentials="anonymous" for a public bucket.'
        ) from None
    except Exception as error:
        raise PermissionError(f"{url}: botocore found no credentials: {type(error).__name__}: {error}") from None
    if found is None:
        _botocore_credentials.cache_clear()
        raise PermissionError(
            f"{url}: no credentials were found, not even by botocore. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            'or AWS_PROFILE; or set credentials="anonymous" for a public bucket.'
        )
    try:
        keys = found.get_frozen_credentials()
    except Exception as error:
        raise PermissionError(
            f"{url}: botocore could not renew the credentials: {type(error).__name__}: {error}"
        ) from None
    expires_at = time.time() + _BOTOCORE_LIFE_S if keys.token else math.inf
    source = f"botocore ({getattr(found, 'method', 'its chain')})"
    return Keys(keys.access_key, keys.secret_key, keys.token or "", expires_at=expires_at, source=source)


def _parsed(variable: str, default: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, default_section="\0", interpolation=None)
    try:
        path = Path(os.environ.get(variable) or default).expanduser()
        parser.read_string(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError, RuntimeError):  # the last: no home folder
        return configparser.RawConfigParser(default_section="\0")
    except (configparser.Error, UnicodeDecodeError):  # the message may quote a secret
        raise ValueError(f"{path}: is no file of AWS settings: mend it, or set {variable}") from None
    return parser


def _by_plain_name(config: configparser.RawConfigParser) -> Mapping[str, Mapping[str, str]]:
    """Return the sections of AWS's config, whose names may be quoted as in a shell."""
    found = {}
    for name, section in config.items():
        try:
            plain = " ".join(shlex.split(name))
        except ValueError:  # a quote without an end
            plain = name
        found[plain] = section
    return found


def _endpoint_of(config: Mapping[str, Mapping[str, str]], values: dict[str, str]) -> str:
    """Return the endpoint of S3: of the profile's ``services`` section, or its own."""
    section = f"services {values.get('services', '')}"
    own = _nested(config[section].get("s3", ""), "endpoint_url") if section in config else ""
    return own or values.get("endpoint_url", "")


def _nested(lines: str, name: str) -> str:
    """Return a value of a setting with settings of its own, one a line; "" if it is not there."""
    for line in lines.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == name:
            return value.strip()
    return ""
