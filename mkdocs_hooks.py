"""Makes links of notebooks work in the built documentation.

Notebooks link to files of the repository, as GitHub and Jupyter show them. MkDocs resolves such
links in Markdown pages, but not in notebooks.
"""

from __future__ import annotations

import logging
import re
from pathlib import PurePosixPath
from typing import Any

_LOG = logging.getLogger("mkdocs.hooks.notebook_links")  # a warning fails a strict build


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Replaces links to other notebooks and to files of ``docs`` by links to their pages."""
    source = PurePosixPath(page.file.src_uri)
    if source.suffix != ".ipynb":
        return html

    def resolved(link: re.Match[str]) -> str:
        target = link["target"].removeprefix("../docs/")
        path = target if target != link["target"] else str(source.parent / target)
        file = files.get_file_from_path(path)
        if file is None:
            _LOG.warning("%s links to %s, which is no page", source, link["target"])
            return link[0]
        return f'href="{file.url_relative_to(page.file)}{link["anchor"]}"'

    return re.sub(
        r'href="(?P<target>[\w./-]+\.(?:md|ipynb))(?P<anchor>(?:#[^"]*)?)"', resolved, html
    )
