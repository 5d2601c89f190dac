"""Build hook: README and addresses of the package's metadata.

A package index shows the README outside of the repository, where relative links lead nowhere. The
hook makes them absolute with the repository's ``address`` (pyproject.toml). Without an address it
keeps their text and leaves out links and pictures.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")


def portable(readme: str, address: str, version: str) -> str:
    """A README without relative links.

    Args:
        readme: Markdown text with links relative to the repository's root.
        address: Address of the repository, such as ``https://host/owner/name``. Empty: not public.
        version: Version of the package. Links lead to the files of the tag ``v<version>``.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link["picture"], link["text"], link["target"]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if not address:
            return "" if picture else text
        view = "raw" if picture else "blob"
        return f"{picture}[{text}]({address.rstrip('/')}/{view}/v{version}/{target})"

    return _LINK.sub(absolute, readme)


class CustomMetadataHook(MetadataHookInterface):
    """Sets ``readme`` and ``urls`` of the package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        address: str = self.config["address"]
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": portable(text, address, metadata["version"]),
        }
        metadata["urls"] = {}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/v{metadata['version']}/CHANGELOG.md",
            }
