"""Where Azure's tools find an account and its secrets: the environment, and azure-identity."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gdsdata.fork_safe import fork_safe_lock, forks_wait
from gdsdata.storage.secret import AccountKey, Secret, SharedAccess, Token

_SCOPE = "https://storage.azure.com/.default"
_SOURCE = "AZURE_STORAGE_... in the environment"
_found: Any = None
_finding = fork_safe_lock()  # guards _found


def connection_string() -> dict[str, str]:
    """Return the parts of AZURE_STORAGE_CONNECTION_STRING: none if it is not set."""
    parts = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    pairs = (part.partition("=") for part in parts if "=" in part)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def account_of_environment() -> str:
    """Return the account that the environment names, or ""."""
    return (
        os.environ.get("AZURE_STORAGE_ACCOUNT")
        or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        or _account_of(connection_string())
    )


def endpoint_of_environment(account: str) -> tuple[str, str]:
    """Return the endpoint that the environment names for an account, and what names it.

    Both are "" if nothing does. A connection string names the endpoint of its own account alone.
    """
    if os.environ.get("AZURE_STORAGE_ENDPOINT"):
        return os.environ["AZURE_STORAGE_ENDPOINT"], "AZURE_STORAGE_ENDPOINT"
    parts = connection_string()
    endpoint = parts.get("blobendpoint", "")
    if _account_of(parts) not in ("", account):
        return "", ""
    if not endpoint and parts.get("endpointsuffix"):
        scheme = parts.get("defaultendpointsprotocol", "https")
        endpoint = f"{scheme}://{account}.blob.{parts['endpointsuffix']}"
    return endpoint, "AZURE_STORAGE_CONNECTION_STRING"


def _account_of(parts: Mapping[str, str]) -> str:
    """Return the account of a connection string; one with a SAS names it by its endpoint alone."""
    account, dot, _ = (urlsplit(parts.get("blobendpoint", "")).hostname or "").partition(".blob.")
    return parts.get("accountname") or (account if dot else "")


def find_secret(url: str) -> Secret:
    """Return the environment's key or SAS, or a token of azure-identity.

    Raises:
        PermissionError: there is none.
    """
    parts = connection_string()
    sas = os.environ.get("AZURE_STORAGE_SAS_TOKEN") or parts.get("sharedaccesssignature")
    if sas:
        return SharedAccess(sas, source=_SOURCE)
    key = os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY") or parts.get("accountkey")
    if key:
        return AccountKey(key, source=_SOURCE)
    try:
        return _token_of_azure_identity()
    except ImportError:
        more = 'run pip install "gdsdata[azure]" for managed identities and az login'
    except Exception as error:
        more = f"azure-identity found none either ({type(error).__name__}: run az login)"
    raise PermissionError(
        f"{url}: no credentials were found. Set AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_KEY or "
        f'AZURE_STORAGE_CONNECTION_STRING; {more}; or set credentials="anonymous" for a public container.'
    )


def _token_of_azure_identity() -> Token:
    global _found
    with _finding:
        if _found is None:
            with forks_wait():
                found = importlib.import_module("azure.identity").DefaultAzureCredential()
                token = found.get_token(_SCOPE)
                _found = found
        else:
            token = _found.get_token(_SCOPE)
        return Token(token.token, expires_at=float(token.expires_on), source="azure-identity")
