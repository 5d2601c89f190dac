"""Store addresses, such as ``s3://bucket/kv``, and credential-free error messages about them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

OBJECT_SCHEMES = ("s3", "gs", "az")
REDIS_SCHEMES = ("redis", "rediss")

_CREDENTIALS = {
    **dict.fromkeys(REDIS_SCHEMES, "REDIS_USERNAME and REDIS_PASSWORD"),
    **dict.fromkeys(
        OBJECT_SCHEMES, "the environment variables of the provider, such as AWS_ACCESS_KEY_ID"
    ),
    "file": "the folder's own permissions",
}
"""Where to configure credentials, by scheme."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)(?=:/)|(s3|gs|az|rediss?|file)(?=:)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
_CREDENTIAL_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS")
_CREDENTIAL_OWNERS = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "REDIS_")
_LONGEST_REASON = 500

# Error document of an S3 server. The groups are the error code and the message.
_XML_ERROR = re.compile(r"<\?xml.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", re.DOTALL)

# Patterns of client-library errors with a known cause, each with advice. The first match applies.
_ADVICE = (
    (r"NoSuchBucket", "create the bucket or correct its name"),
    (
        r"//169\.254\.169\.254/",
        "no credentials in the environment, and the machine has no role: set AWS_ACCESS_KEY_ID "
        "and AWS_SECRET_ACCESS_KEY, or your provider's equivalents",
    ),
    (
        r"40[13] (Unauthorized|Forbidden)",
        "the server rejected the credentials, or they do not permit this operation: check "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or your provider's equivalents",
    ),
    (r"(?i)redirect", "set AWS_REGION to the bucket's region"),
    (r"error sending request", "check that the server is running and AWS_ENDPOINT_URL is correct"),
    (r"Account must be specified", "set AZURE_STORAGE_ACCOUNT_NAME"),
    (
        r"HELLO must be called|NOAUTH|[Aa]uthentication required|username-password",
        "set REDIS_PASSWORD, and REDIS_USERNAME if the server uses ACLs",
    ),
)


def scheme_of(spec: str) -> str:
    """Return the scheme of an address in lower case, for example ``s3``. Empty for a path."""
    if not spec:
        raise ValueError("Empty store address: expected a path or s3://bucket/prefix")
    if spec.startswith("memory:"):
        return "memory"
    if (match := _SCHEME.match(spec)) is None:
        return ""
    if not spec.startswith(f"{match[0]}://"):
        raise ValueError(  # The rest may contain a password.
            f"Expected two slashes after {match[0]}: in a store address; pass it as a str, because "
            "pathlib.Path removes one of them"
        )
    return match[0].lower()


def lasts(spec: str) -> bool:
    """Whether entries at an address outlive this process and are accessible to other processes."""
    return scheme_of(spec) != "memory"


def is_cache(spec: str | Path) -> bool:
    """Whether an address belongs to a cache server, which may evict entries."""
    return scheme_of(str(spec)) in REDIS_SCHEMES


def bytes_of(size: str) -> int:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(
            f"Expected a size such as 2GiB, or memory:2GiB for a store, found {size!r}"
        )
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def folder_of(url: str) -> Path:
    check_no_credentials(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"Expected file:/// and an absolute path on this machine, found {url!r}")
    return Path(unquote(parts.path))


def check_no_credentials(url: str) -> None:
    """Reject an address with credentials, because addresses are displayed, logged and saved."""
    if not (scheme := scheme_of(url)):
        return  # A path has no credentials.
    instead = _CREDENTIALS.get(scheme, "the environment")
    try:
        parts = urlsplit(url)
    except ValueError:  # The original message would contain the credentials.
        raise ValueError(
            f"Invalid server address after {scheme}://: expected host[:port]"
        ) from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ValueError(
            "A store address must not contain a user, password, query or fragment, because it is "
            f"displayed and logged; use {place}, and configure credentials with {instead}"
        )


def reason(error: BaseException) -> str:
    """Summarize a client-library error in one line, without credentials, and with advice if the
    cause is known."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split()) or type(error).__name__
    text = _XML_ERROR.sub(r"\1: \2", text)
    text = re.sub(r"(?<!<)\?[^\s\"'<>)]+", "?...", text)  # Queries may contain signatures.
    text = re.sub(r"//[^/\s@]+@", "//", text)
    for name, value in os.environ.items():
        owned = name.startswith(_CREDENTIAL_OWNERS) and _CREDENTIAL_NAMES.search(name)
        if owned and len(value) >= 4:
            text = text.replace(value, "***")
    advice = next((f"; {todo}" for sign, todo in _ADVICE if re.search(sign, text)), "")
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_LONGEST_REASON]}..."
    return text.rstrip(".") + advice if advice else text
