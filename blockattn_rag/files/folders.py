"""Where this package keeps what must outlive a process and belongs to no project."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """``$BLOCKATTN_RAG_HOME``, or a folder of ours below the user's cache folder
    (``$XDG_CACHE_HOME``, else ``~/.cache``).

    Raises:
        RuntimeError: the user has no home folder.
    """
    if home := os.environ.get("BLOCKATTN_RAG_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockattn_rag"
