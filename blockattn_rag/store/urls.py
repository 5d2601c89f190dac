"""Addresses of stores: which kind they name, and how to speak of them without credentials."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)(?=:/)|(s3|gs|az|rediss?|file)(?=:)", re.IGNORECASE)
_CREDENTIAL_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS")
_CREDENTIAL_OWNERS = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "REDIS_")
_LONGEST_REASON = 500

# What S3 servers say of an error, around the two parts that tell of it.
_XML_ERROR = re.compile(r"<\?xml.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", re.DOTALL)

# What client libraries say where the settings are wrong, and what to do; the first one counts.
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
    """The scheme of an address such as ``s3://bucket/kv``, in lower case; empty for a path.

    Raises:
        ValueError: it is empty, or was meant as an address and is none: ``s3:bucket``, or what
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
    """What a client library says of an error, and what to do about it where that is known: on one
    line, short, and without credentials."""
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
