"""Opening stores by paths and addresses."""

from __future__ import annotations

import builtins
import traceback
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.store import (
    DirectoryStore,
    MemoryStore,
    ObjectStore,
    RedisStore,
    TieredStore,
    open_store,
)
from blockattn_rag.store.urls import lasts, reason, scheme_of


def test_a_cache_without_a_home_store_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("redis")
    open_store("redis://localhost:1/0")  # connects on first use
    assert "is a cache: blocks that it evicts" in caplog.text
    caplog.clear()
    TieredStore("redis://localhost:1/0", "memory:")
    assert not caplog.text


def test_open_store_accepts_stores_and_refuses_other_types() -> None:
    memory = MemoryStore(1)
    assert open_store(memory) is memory
    with pytest.raises(TypeError, match="a KVStore, a path, an address or None, found int"):
        open_store(3)  # type: ignore[arg-type]


def test_path_or_file_address_opens_a_directory_store(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    for spec in (folder, str(folder), f"file://{tmp_path}/a%20b"):
        opened = open_store(spec)
        assert isinstance(opened, DirectoryStore)
        assert opened.path == folder
    with pytest.raises(ValueError, match="absolute path on this machine"):
        open_store("file://elsewhere/kv")


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        (ObjectStore, "s3://bucket/kv"),
        (ObjectStore, "gs://bucket/kv"),
        (ObjectStore, "az://container/kv"),
        (RedisStore, "redis://host:1/2"),
        (RedisStore, "rediss://host:1/2"),
    ],
)
def test_address_opens_a_remote_store(
    kind: type[ObjectStore | RedisStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore" if kind is ObjectStore else "redis")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    opened = open_store(url)
    assert isinstance(opened, kind)
    assert opened.url == url


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (None, 1 << 30),
        ("memory:", 1 << 30),
        ("memory://", 1 << 30),
        ("memory:2GiB", 2 << 30),
        ("memory:1.5 MB", 1_500_000),
        ("memory:500k", 500_000),
        ("memory:17", 17),
    ],
)
def test_a_memory_address_sets_the_size(spec: str | None, nbytes: int) -> None:
    opened = open_store(spec)
    assert isinstance(opened, MemoryStore)
    assert opened.max_bytes == nbytes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ftp://host/kv", "Unknown store address ftp://, expected a path, s3://bucket/prefix"),
        ("http://host/kv", "Unknown store address http://"),
        ("memory:much", "a size such as 2GiB, or memory:2GiB for a store, found 'much'"),
        ("memory:0", "must be positive"),
        ("s3:/bucket/kv", "two slashes after s3:"),
        ("s3:bucket/kv", "two slashes after s3:"),
        ("redis:host", "two slashes after redis:"),
        ("file:kv", "two slashes after file:"),
        ("", "Empty store address: expected a path or s3://"),
        ("s3://", "No bucket in s3:, expected an address such as s3://bucket/kv"),
        ("redis://host/cache", "Invalid database 'cache' in redis://host/cache: expected a num"),
        (Path("s3://bucket/kv"), "pathlib.Path removes one of them"),
    ],
)
def test_invalid_address_is_refused(spec: str | Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "redis://me:a secret@host/0",
        "REDIS://me:a secret@host/0",
        "S3://key:a secret@bucket/kv",
        "file://me:a secret@host/kv",
        "http://me:a secret@host/kv",
        "redis://me:a secret@ho\N{ACCOUNT OF}st/0",
        Path("redis://me:a secret@host/0"),
    ],
)
def test_credentials_are_refused_and_not_shown(
    spec: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"address|expected") as raised:
        open_store(spec)
    told = "".join(traceback.format_exception(raised.value))
    assert "a secret" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://bucket/kv", "obstore", "s3"), ("redis://host/0", "redis", "redis")],
)
def test_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=rf"{url} needs {package}.*\.\[{extra}\]"):
        open_store(url)


def test_path_with_a_colon_is_not_an_address(tmp_path: Path) -> None:
    assert scheme_of("C:/kv") == ""
    assert scheme_of("kv:old") == ""
    assert scheme_of("S3://bucket/kv") == "s3"
    assert [lasts(spec) for spec in ("kv", "s3://bucket/kv", "memory:2GiB")] == [True, True, False]
    assert isinstance(open_store(tmp_path / "kv:old"), DirectoryStore)


def test_endpoint_needs_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")  # without a scheme, it panics at the first request
    monkeypatch.setenv("AWS_ENDPOINT_URL", "me:secret@127.0.0.1:9000")
    expected = "AWS_ENDPOINT_URL is not a server address: expected http://"
    with pytest.raises(ValueError, match=expected) as e:
        open_store("s3://bucket/kv")
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "GET http://host/b failed - 404 Not Found: <?xml version='1.0'?> <Error>\n<Code>"
            "NoSuchBucket</Code><Message>There is none</Message><HostId>x</HostId></Error>",
            "404 Not Found: NoSuchBucket: There is none; create the bucket",
        ),
        ("PUT http://169.254.169.254/latest/api - 403 Forbidden", "no credentials in the env"),
        ("HEAD http://host/b/x - 403 Forbidden: ", "; the server rejected the credentials"),
        ("GET http://host/b/x - HTTP error: error sending request", "; check that the server is"),
        ("Received redirect without LOCATION", "; set AWS_REGION"),
        ("Generic MicrosoftAzure error: Account must be specified", "; set AZURE_STORAGE_ACCOUNT_"),
        ("invalid username-password pair or user is disabled.", "disabled; set REDIS_PASSWORD"),
        ("HELLO must be called with the client already authenticated", "; set REDIS_PASSWORD"),
    ],
)
def test_reason_gives_advice(said: str, told: str) -> None:
    assert told in reason(OSError(said))
    assert told.partition("; ")[2] in reason(OSError("x" * 600 + said))


def test_reason_is_one_line_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "0123456789")
    error = ValueError(
        "no answer\n from https://me:pass@host/kv?sig=abc&x=1 with 0123456789 " + "x" * 1000
        + "\n\nDebug source:\n0123456789"
    )  # fmt: skip
    told = reason(error)
    assert told.startswith("no answer from https://host/kv?... with *** xxx")
    assert len(told) < 600
    assert reason(KeyError()) == "KeyError"
