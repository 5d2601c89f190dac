"""Saving replaces the files of a recipe atomically and deletes nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from blockattn_rag import Recipe, files
from blockattn_rag.model import BlockModel
from tests.models import shared_tiny_llama, tiny_tokenizer
from tests.recipes import recipe_of

MODEL = BlockModel(shared_tiny_llama(), tiny_tokenizer(), name="tiny")
OLD = recipe_of(MODEL, report={"name": "old"})
NEW = recipe_of(MODEL, size=0.3, promote=1, report={"name": "new"})
PLAIN = Recipe("bos", report={"name": "plain"})
FILES = ["adapter.safetensors", "recipe.json"]


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, which is slow and does not affect what other processes see."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def names(folder: Path) -> list[str]:
    """Return the names in a folder, without digests and without the recipe's empty lock file."""
    lock = folder / ".lock"
    assert not lock.exists() or lock.read_bytes() == b""
    paths = (path for path in folder.iterdir() if path != lock)
    return sorted(re.sub(r"-[0-9a-f]{16}\.", ".", path.name) for path in paths)


def is_complete(found: Recipe, *expected: Recipe) -> bool:
    """Whether the recipe, including its report, equals one of the expected recipes."""
    return any(found == one and found.report == one.report for one in expected)


def test_files_created_by_file_managers_are_kept(tmp_path: Path) -> None:
    PLAIN.save(tmp_path)
    (tmp_path / ".DS_Store").write_bytes(b"icons")
    NEW.save(tmp_path)
    assert is_complete(Recipe.load(tmp_path), NEW)
    assert (tmp_path / ".DS_Store").read_bytes() == b"icons"


# -- what is replaced ----------------------------------------------------------------------------


PANCAKES = '{"name": "pancakes"}'
SIMILAR = '{\n  "version": 3,\n  "digest": "abc"\n}\n'


@pytest.mark.parametrize(
    ("recipe", "others", "message"),
    [
        (None, {"recipe.json": PANCAKES, "thesis.txt": ""}, "contains 'thesis.txt', expected only"),
        (None, {"recipe.json": PANCAKES}, "is not a recipe of this package"),
        (None, {"recipe.json": SIMILAR}, "is not a recipe of this package"),
        (None, {"recipe.json": "Pancakes: flour, milk, eggs."}, "is not a recipe of this package"),
        (None, {"recipe.json/cat.png": "cat"}, "contains 'recipe.json', expected"),
        (None, {"report.json": "{}", "photos/cat.png": "cat"}, "contains 'photos', 'report.json'"),
        (OLD, {"NOTES.md": "notes"}, "contains 'NOTES.md', expected only the files of a recipe"),
        (OLD, {".thesis.txt.0123456789abcdef.tmp": "thesis"}, "expected only the files of a"),
        (PLAIN, {"adapter.safetensors": "mine"}, "contains 'adapter.safetensors', expected only"),
        (PLAIN, {".lock": "process 7"}, "contains '.lock', expected only the files of a recipe"),
    ],
)
def test_saving_deletes_no_foreign_files(
    tmp_path: Path, recipe: Recipe | None, others: dict[str, str], message: str
) -> None:
    folder = tmp_path / "folder"
    if recipe is not None:
        recipe.save(folder)
    for name, content in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        NEW.save(folder)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("change", [{"sink": 4}, {"version": 99, "more": []}, 40, 0])
def test_saving_replaces_a_damaged_recipe(tmp_path: Path, change: dict[str, Any] | int) -> None:
    """The JSON has other fields, or is truncated."""
    OLD.save(tmp_path / "recipe", plot=b"png")
    path = tmp_path / "recipe" / "recipe.json"
    content = path.read_text()
    if isinstance(change, int):
        path.write_text(content[:change])
    else:
        path.write_text(json.dumps(json.loads(content) | change))
    with pytest.raises(ValueError, match=r"is damaged|has version 99"):
        Recipe.load(tmp_path / "recipe")
    NEW.save(tmp_path / "recipe")
    assert is_complete(Recipe.load(tmp_path / "recipe"), NEW)
    assert names(tmp_path / "recipe") == FILES


def test_saving_cleans_up_after_a_killed_writer(tmp_path: Path) -> None:
    folder = tmp_path / "recipe"
    OLD.save(folder)
    (folder / ".recipe.json.0123456789abcdef.tmp").write_bytes(b"left behind")
    (folder / "adapter-0123456789abcdef.safetensors").write_bytes(b"never committed")
    (folder / ".lock").touch()
    assert is_complete(Recipe.load(folder), OLD)
    NEW.save(folder)
    assert names(folder) == FILES


def test_huge_and_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "recipe"
    PLAIN.save(folder)
    os.truncate(folder / "recipe.json", 1 << 40)  # a sparse file of 1 TiB
    with pytest.raises(ValueError, match=r"recipe.json is damaged: found more than 16 MiB"):
        Recipe.load(folder)
    for content in (b'{"a": ' * 100_000, b"\xff"):
        (folder / "recipe.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"recipe.json is damaged: found no valid JSON"):
            Recipe.load(folder)


def test_a_huge_report_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at most 16,777,216"):
        Recipe("bos", report={"text": "x" * (16 << 20)}).save(tmp_path / "recipe")
    assert names(tmp_path) == []


# -- interruptions -------------------------------------------------------------------------------

STEPS = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "open")


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, number: int, *, is_done: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt before or after call ``number`` of any function in ``STEPS``."""
    calls = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != number:
                return call(*args, **options)
            with suppress(OSError):  # raised by calls that fail anyway
                if is_done and (opened := call(*args, **options)) is not None:
                    os.close(opened)
            raise KeyboardInterrupt

        return step

    with monkeypatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, wrapped(getattr(os, name)))
        yield
        assert calls < number, "KeyboardInterrupt was suppressed"


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (PLAIN, NEW), (OLD, PLAIN), (None, NEW)])
def test_an_interruption_leaves_the_old_or_the_new_recipe(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Recipe | None,
    second: Recipe,
    is_done: bool,
) -> None:
    outcomes = set()
    for number in range(1, 200):
        folder = tmp_path / str(number) / "recipe"
        folder.parent.mkdir()
        if first is not None:
            first.save(folder, plot=b"png")
        try:
            with interrupted(monkeypatch, number, is_done=is_done):
                second.save(folder)
            break
        except KeyboardInterrupt:
            pass
        if first is None and not (folder / "recipe.json").exists():
            outcomes.add("none")
        else:
            found = Recipe.load(folder)
            assert is_complete(found, second, *([first] if first else [])), number
            outcomes.add(found.report["name"])
        second.save(folder)
        assert is_complete(Recipe.load(folder), second)
        assert "report.png" not in names(folder)
        assert [name for name in names(folder) if name.startswith(".")] == []
        assert names(folder.parent) == ["recipe"]
    else:
        pytest.fail("No save completed")
    assert number > 5
    assert outcomes == {first.report["name"] if first else "none", second.report["name"]}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_transient_error_while_reading_deletes_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for number in range(1, 100):
        folder = tmp_path / str(number)
        OLD.save(folder)
        calls = 0

        def fails_once(call: Callable[..., Any], number: int = number) -> Callable[..., Any]:
            def access(path: Path, *args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += path.name == "recipe.json"
                if path.name == "recipe.json" and calls == number:
                    raise OSError(code, os.strerror(code), str(path))
                return call(path, *args, **options)

            return access

        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", fails_once(Path.open))
            patched.setattr(Path, "stat", fails_once(Path.stat))
            try:
                NEW.save(folder)
                expected = [NEW]
            except OSError:
                expected = [OLD, NEW]
        assert is_complete(Recipe.load(folder), *expected), number
        if calls < number:
            break
    assert number > 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_an_unreadable_recipe_does_not_count_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    PLAIN.save(tmp_path)

    def fails(path: Path, *_: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match=r"recipe\.json"):
        Recipe.load(tmp_path)


# -- concurrency ---------------------------------------------------------------------------------


def test_a_recipe_replaced_during_loading_is_loaded_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OLD.save(tmp_path / "recipe")
    read = json.loads
    others = [NEW, OLD, NEW]

    def replacing(content: Any) -> Any:
        found = read(content)
        if others and "digest" in found:
            with monkeypatch.context() as patched:
                patched.setattr(json, "loads", read)
                others.pop().save(tmp_path / "recipe")
        return found

    monkeypatch.setattr(json, "loads", replacing)
    assert is_complete(Recipe.load(tmp_path / "recipe"), NEW)
    assert not others


def test_concurrent_loads_and_saves_return_complete_recipes(tmp_path: Path) -> None:
    folder = tmp_path / "recipe"
    PLAIN.save(folder)
    saved = threading.Event()
    loads = 0

    def save(recipes: list[Recipe]) -> None:
        for recipe in recipes:
            recipe.save(folder, plot=recipe.report["name"].encode())

    def load() -> None:
        nonlocal loads
        while not saved.is_set():
            assert is_complete(Recipe.load(folder), OLD, NEW, PLAIN)
            loads += 1

    with ThreadPoolExecutor(3) as pool:
        reader = pool.submit(load)
        orders = [[OLD, PLAIN, NEW, OLD, NEW] * 5, [NEW, OLD, PLAIN, NEW, OLD] * 5]
        writers = [pool.submit(save, order) for order in orders]
        wait(writers)
        saved.set()
        for work in (reader, *writers):
            work.result()
    assert loads
    found = Recipe.load(folder)
    (plot,) = folder.glob("report-*.png")
    assert found.report["name"].encode() == plot.read_bytes()
    assert names(folder) == sorted([*FILES, "report.png"])
    assert names(tmp_path) == ["recipe"]


def test_saving_fails_if_the_lock_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "LOCK_WARNING_S", 0.01, raising=False)
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.02, raising=False)
    folder = tmp_path / "recipe"
    PLAIN.save(folder)
    with FileLock(folder / ".lock"), pytest.raises(TimeoutError, match=r"recipe/\.lock is still"):
        NEW.save(folder)
    assert f"Waiting for {folder / '.lock'}, which another process or thread" in caplog.text
    assert is_complete(Recipe.load(folder), PLAIN)
    NEW.save(folder)
    assert is_complete(Recipe.load(folder), NEW)
