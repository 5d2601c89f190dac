"""Model names: detection of mistyped paths, and one-sentence errors for the model hub.

The command line checks names before it loads torch, so this module does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

EXPECTED = "a folder, a .gguf file, a hub id, 'bundled' or 'smollm2'"
_PROBE_S = 5.0
"""Seconds to wait for the hub's first response."""
_REMEMBERED_S = 60
"""Maximum number of seconds to cache the result of a probe."""

_lock = threading.Lock()
_offline_loads = 0


def existing_model(name: str | None) -> str | None:
    """Check that a model name is not a mistyped path, and return it unchanged.

    For a mistyped path, the hub's own error message only mentions repository ids.

    Raises:
        FileNotFoundError: The name is neither a model on this machine nor a valid hub id.
    """
    if not name:
        return name
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return name
    if path.is_file():
        raise FileNotFoundError(f"Found the file {name}, expected {EXPECTED}.")
    if is_path(name) or not _is_hub_id(name):
        raise FileNotFoundError(f"No such model: {name}; expected {EXPECTED}.")
    return name


def is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@contextlib.contextmanager
def hub_errors(
    name: str, *, is_local: bool = False, shown: str = "", expected: str = EXPECTED, fix: str = ""
) -> Iterator[None]:
    """Context manager that probes the hub before a model is loaded, and shortens the hub's errors.

    The hub's packages retry every file several times, and raise multi-line errors about tokens,
    caches and web pages. Without a connection, these errors do not name the model.

    Args:
        is_local: Whether the model is on this machine. The hub is not probed for local models, nor
            if ``name`` is an existing path.
        shown: Name to show in the message. Default: ``name``.
        expected: Description of valid names, for the message.
        fix: Text that replaces ``expected`` in the message. ``{why}`` is replaced by the reason.

    Raises:
        OSError: The hub does not provide the model. Other errors propagate unchanged.
    """
    try:
        with _offline_if_unreachable(is_local or Path(name).expanduser().exists()):
            why = _why_offline()
            yield
    except (OSError, ValueError) as error:
        if (cause := _hub_error(error)) is None:
            raise
        shown = shown or name
        why = why or str(error).partition("\n")[0].rstrip(".")
        if fix:
            raise OSError(f"Cannot load {shown}: {fix.format(why=why)}.") from error
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        is_private = "RepositoryNotFoundError" in kinds  # Or it does not exist.
        login = " (private and gated models need `hf auth login`)" if is_private else ""
        raise OSError(f"Cannot load {shown}: {why}; expected {expected}{login}.") from error


def _why_offline() -> str:
    """Reason why only the hub's local cache is used. Empty if the hub itself is used."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return ""
    missing = f"it is neither a local path nor in the hub's cache {constants.HF_HUB_CACHE}"
    if _offline_loads:
        return f"{missing}, and the hub {constants.ENDPOINT} cannot be reached"
    return f"{missing}, and HF_HUB_OFFLINE is set"


@contextlib.contextmanager
def _offline_if_unreachable(is_local: bool) -> Iterator[None]:
    """Use only the hub's cache if the hub does not respond, instead of retrying for minutes.

    Sets the global ``HF_HUB_OFFLINE``, because transformers ignores ``local_files_only`` in some
    requests. Concurrent loads share the setting, and the last of them resets it.
    """
    global _offline_loads
    from huggingface_hub import constants

    with _lock:
        # Offline mode that this module did not set must stay on after the load.
        is_offline = constants.HF_HUB_OFFLINE and not _offline_loads
        switches = not is_local and not is_offline
        switches = switches and (bool(_offline_loads) or not _responds(constants.ENDPOINT))
        if switches:
            _offline_loads += 1
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        if switches:
            with _lock:
                _offline_loads -= 1
                constants.HF_HUB_OFFLINE = _offline_loads > 0


def _responds(hub: str) -> bool:
    return _probed(hub, int(time.monotonic() / _REMEMBERED_S))


@functools.lru_cache(maxsize=1)
def _probed(hub: str, period: int) -> bool:  # noqa: ARG001 - part of the cache key
    """Whether the hub responds. Cached, because one command may load several models."""
    import httpx
    from huggingface_hub import get_session

    try:
        get_session().head(hub, timeout=_PROBE_S)
    except httpx.TransportError:
        return False
    return True


def _hub_error(error: BaseException) -> BaseException | None:
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if type(cause).__module__.partition(".")[0] == "huggingface_hub":
            return cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None
