"""Build hook: README, addresses and requirements of the packages' metadata.

A package index shows the README outside of the repository, where relative links lead nowhere. The
hook makes them absolute with the repository's ``address`` (pyproject.toml). Without an address it
keeps their text and leaves out links and pictures. The packages in ``packages/`` load this file
for their own metadata.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")


def portable(readme: str, address: str, version: str, folder: str = "") -> str:
    """A README without relative links.

    Args:
        readme: Markdown text with relative links.
        address: Address of the repository, such as ``https://host/owner/name``. Empty: not public.
        version: Version of the package. Links lead to the files of the tag ``v<version>``.
        folder: Folder of the README in the repository. Default: the repository's root.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link["picture"], link["text"], link["target"]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if not address:
            return "" if picture else text
        view, target = (
            "raw" if picture else "blob",
            posixpath.normpath(posixpath.join(folder, target)),
        )
        return f"{picture}[{text}]({address.rstrip('/')}/{view}/v{version}/{target})"

    return _LINK.sub(absolute, readme)


def settings() -> dict[str, str]:
    """The table ``tool.blockattn`` of the repository's pyproject.toml: ``address``."""
    path = Path(__file__).parent / "pyproject.toml"
    table: dict[str, str] = tomllib.loads(path.read_text("utf-8"))["tool"]["blockattn"]
    return table


def complete(metadata: dict[str, Any], folder: Path, extra: str = "") -> None:
    """Sets ``readme`` and ``urls`` of a package's metadata, in place.

    Args:
        metadata: The table ``project``, with ``version``.
        folder: Folder of the package, with its README.md.
        extra: Extra of ``blockattn-rag`` that the package requires, in exactly its own version: it
            re-exports that extra's names. Sets ``dependencies``. Default: none, the main package.
    """
    address, version = settings()["address"].rstrip("/"), metadata["version"]
    place = folder.resolve().relative_to(Path(__file__).resolve().parent).as_posix()
    text = portable((folder / "README.md").read_text("utf-8"), address, version, place)
    metadata["readme"] = {"content-type": "text/markdown", "text": text}
    metadata["urls"] = {}
    if address:
        metadata["urls"] = {
            "Repository": address,
            "Issues": f"{address}/issues",
            "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        }
    if extra:
        metadata["dependencies"] = [f"blockattn-rag[{extra}]=={version}"]


class CustomMetadataHook(MetadataHookInterface):
    """Completes the metadata of the main package."""

    def update(self, metadata: dict[str, Any]) -> None:
        complete(metadata, Path(self.root))
