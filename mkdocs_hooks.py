"""Sets the addresses of the documentation, and makes links of notebooks work in it.

The repository's address (pyproject.toml, ``tool.blockattn``) gives the link "edit this page" and
the address of the site. While it is empty, the site has neither.

Notebooks link to files of the repository, as GitHub and Jupyter show them. MkDocs resolves such
links in Markdown pages, but not in notebooks.
"""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

_LOG = logging.getLogger("mkdocs.hooks.notebook_links")  # a warning fails a strict build


def on_config(config: Any) -> Any:
    """Sets ``repo_url``, ``edit_uri`` and ``site_url`` from the repository's address."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())
    address = project["tool"]["blockattn"]["address"].rstrip("/")
    if address:
        config.repo_url, config.repo_name = address, address.split("/", 3)[-1]
        config.edit_uri = "edit/main/docs/"
        if pages := re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)", address):
            config.site_url = f"https://{pages[1].lower()}.github.io/{pages[2]}/latest/"
    return config


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
