"""Addresses of stores: which kind they name, and how to speak of them without credentials."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)
_CREDENTIAL_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS")
_CREDENTIAL_OWNERS = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "REDIS_")
_LONGEST_REASON = 500


def scheme_of(spec: str) -> str:
    """The scheme of an address such as ``s3://bucket/kv``, in lower case; empty for a path.

    Raises:
        ValueError: it was written as an address and made a path since, as ``pathlib.Path`` does.
    """
    if spec.startswith("memory:"):
        return "memory"
    if (match := _SCHEME.match(spec)) is None:
        return ""
    if not spec.startswith(f"{match[1]}://"):
        raise ValueError(  # without the rest, which may hold a password
            f"found {match[1]}:/, expected two slashes after {match[1]}:; give an address as a "
            "str, because pathlib.Path takes one of them away"
        )
    return match[1].lower()


def lasts(spec: str) -> bool:
    """Whether what is stored there outlives this process, and others find it."""
    return scheme_of(spec) != "memory"


def check_no_credentials(url: str, instead: str) -> None:
    """Refuse an address that holds credentials: addresses are shown, logged and written to files.

    Args:
        instead: where to put them.

    Raises:
        ValueError: it holds some; the message does not show them.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # its message would show what the address holds
        raise ValueError(f"the address after {scheme_of(url)}:// is none of a server") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ValueError(
            f"the address of a store holds no user, password, query or fragment, because it is "
            f"shown and stored; write {place}, and put credentials into {instead}"
        )


def reason(error: BaseException) -> str:
    """What a client library says of an error, on one line, short, and without credentials."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split()) or type(error).__name__
    text = re.sub(r"(?<!<)\?[^\s\"'<>)]+", "?...", text)  # signatures stand in queries
    text = re.sub(r"//[^/\s@]+@", "//", text)
    for name, value in os.environ.items():
        owned = name.startswith(_CREDENTIAL_OWNERS) and _CREDENTIAL_NAMES.search(name)
        if owned and len(value) >= 4:
            text = text.replace(value, "***")
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
