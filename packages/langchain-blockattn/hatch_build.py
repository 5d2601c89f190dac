"""Build hook: takes metadata from the repository around this folder.

A wheel that is built from the sdist has no repository around it, and needs none: PKG-INFO has the
metadata that was resolved when the sdist was made.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """Completes the metadata with the repository's ``hatch_build.py``."""

    def update(self, metadata: dict[str, Any]) -> None:
        folder = Path(self.root)
        if not (folder / "PKG-INFO").exists():
            complete = runpy.run_path(str(folder.parents[1] / "hatch_build.py"))["complete"]
            complete(metadata, folder, self.config["extra"])
