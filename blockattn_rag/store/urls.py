"""Addresses of stores, such as ``s3://bucket/kv``, and messages about them without credentials."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

OBJECT_SCHEMES = ("s3", "gs", "az")
REDIS_SCHEMES = ("redis", "rediss")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)(?=:/)|(s3|gs|az|rediss?|file)(?=:)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
_CREDENTIAL_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS")
_CREDENTIAL_OWNERS = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "REDIS_")
_LONGEST_REASON = 500

# An error of S3 servers, with its two informative parts.
_XML_ERROR = re.compile(r"<\?xml.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", re.DOTALL)

# Messages of client libraries if settings are wrong, and what to do. The first match counts.
_ADVICE = (
    (r"NoSuchBucket", "make the bucket, or correct its name"),
    (
        r"//169\.254\.169\.254/",
        "the environment holds no credentials, and the machine has no role: set AWS_ACCESS_KEY_ID "
        "and AWS_SECRET_ACCESS_KEY, or what your provider calls them",
    ),
    (
        r"40[13] (Unauthorized|Forbidden)",
        "the server refuses these credentials, or they do not allow this: see AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_REGION, or what your provider calls them",
    ),
    (r"(?i)redirect", "set AWS_REGION to the bucket's region"),
    (r"error sending request", "see whether the server is up and AWS_ENDPOINT_URL is right"),
    (r"Account must be specified", "set AZURE_STORAGE_ACCOUNT_NAME"),
    (
        r"HELLO must be called|NOAUTH|[Aa]uthentication required|username-password",
        "set REDIS_PASSWORD, and REDIS_USERNAME where there are users",
    ),
)


def scheme_of(spec: str) -> str:
    """Scheme of an address such as ``s3://bucket/kv``, in lower case. Empty for a path.

    Raises:
        ValueError: It is empty, or a malformed address such as ``s3:bucket``, or what
            ``pathlib.Path`` makes of ``s3://bucket``.
    """
    if not spec:
        raise ValueError("found an empty address of a store, expected a path or s3://bucket/prefix")
    if spec.startswith("memory:"):
        return "memory"
    if (match := _SCHEME.match(spec)) is None:
        return ""
    if not spec.startswith(f"{match[0]}://"):
        raise ValueError(  # without the rest, which may hold a password
            f"expected two slashes after {match[0]}: in the address of a store; give it as a str, "
            "because pathlib.Path takes one of them away"
        )
    return match[0].lower()


def lasts(spec: str) -> bool:
    """Whether what is stored at an address outlives this process, and other processes find it."""
    return scheme_of(spec) != "memory"


def is_cache(spec: str | Path) -> bool:
    """Whether an address is that of a server that evicts entries."""
    return scheme_of(str(spec)) in REDIS_SCHEMES


def bytes_of(size: str) -> int:
    """Number of bytes of a size such as ``2GiB``.

    Raises:
        ValueError: It is malformed.
    """
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(
            f"expected a size such as 2GiB, or memory:2GiB for a store, found {size!r}"
        )
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def folder_of(url: str) -> Path:
    """Folder of a ``file:`` address."""
    check_no_credentials(url, "the folder's own permissions")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"expected file:/// and an absolute path on this machine, found {url!r}")
    return Path(unquote(parts.path))


def check_no_credentials(url: str, instead: str) -> None:
    """Refuse an address with credentials: addresses are displayed, logged and written to files.

    Args:
        instead: Where to put them.

    Raises:
        ValueError: There are some. The message does not show them.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # its message would show what the address holds
        raise ValueError(
            f"Invalid server address after {scheme_of(url)}://: expected host[:port]"
        ) from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ValueError(
            f"the address of a store holds no user, password, query or fragment, because it is "
            f"shown and stored; write {place}, and put credentials into {instead}"
        )


def reason(error: BaseException) -> str:
    """Message of a client library's error, with advice if there is some. One short line without
    credentials."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split()) or type(error).__name__
    text = _XML_ERROR.sub(r"\1: \2", text)
    text = re.sub(r"(?<!<)\?[^\s\"'<>)]+", "?...", text)  # signatures stand in queries
    text = re.sub(r"//[^/\s@]+@", "//", text)
    for name, value in os.environ.items():
        owned = name.startswith(_CREDENTIAL_OWNERS) and _CREDENTIAL_NAMES.search(name)
        if owned and len(value) >= 4:
            text = text.replace(value, "***")
    advice = next((f"; {todo}" for sign, todo in _ADVICE if re.search(sign, text)), "")
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_LONGEST_REASON]}..."
    return text.rstrip(".") + advice if advice else text
