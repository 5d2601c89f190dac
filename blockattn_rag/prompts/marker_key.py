"""The key that tells this installation's markers from all others."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from blockattn_rag.files import state_folder, temporary_name

logger = logging.getLogger("blockattn_rag")

KEY_VARIABLE = "BLOCKATTN_RAG_MARKER_KEY"
"""Environment variable with the key, for programs on several machines that pass marked text on."""

_KEY_BYTES = 32
_SHORTEST_KEY = 16
_key_guard = threading.Lock()


def marker_key() -> bytes:
    """The key of this installation: from the environment, else from a file of the user's.

    Where no file can be kept, the key lives as long as the process.

    Raises:
        ValueError: the key in the environment is so short that it could be guessed.
    """
    with _key_guard:  # threads that come at once must not make one key each
        return _found_key()


@cache
def _found_key() -> bytes:
    if given := os.environ.get(KEY_VARIABLE):
        if len(given) < _SHORTEST_KEY:
            raise ValueError(
                f"{KEY_VARIABLE} has {len(given)} characters, expected at least {_SHORTEST_KEY}, "
                "drawn at random: python -c 'import secrets; print(secrets.token_hex())'"
            )
        return given.encode()
    try:
        return _key_in(state_folder() / "marker.key")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.info("markers are valid in this process only: no key can be kept (%s)", error)
        return secrets.token_bytes(_KEY_BYTES)


def _key_in(path: Path) -> bytes:
    """The key in a file that only the user can read; made by whoever comes first."""
    with suppress(FileNotFoundError):
        if len(key := path.read_bytes()) == _KEY_BYTES:
            return key
        path.unlink()  # cut short by a full disk: no key at all
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.touch(0o600, exist_ok=False)
    try:
        temporary.write_bytes(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # another process was first: its key is the one
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return path.read_bytes()
