"""The documentation site: address, edit links, versions, pages and social card."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import yaml
from PIL import Image

ROOT = Path(__file__).parents[1]


def configured(folder: Path, address: str) -> SimpleNamespace:
    """Return the MkDocs config after the hook, for a repository with this address."""
    (folder / "pyproject.toml").write_text(f'[tool.blockattn]\naddress = "{address}"\n')
    config = SimpleNamespace(config_file_path=str(folder / "mkdocs.yml"), site_url=None)
    hook = runpy.run_path(str(ROOT / "mkdocs_hooks.py"))["on_config"]
    return hook(config)  # type: ignore[no-any-return]


def test_the_repository_address_determines_edit_links_and_site_address(tmp_path: Path) -> None:
    config = configured(tmp_path, "https://github.com/Owner/name/")
    assert config.repo_url == "https://github.com/Owner/name"
    assert (config.repo_name, config.edit_uri) == ("Owner/name", "edit/main/docs/")
    assert config.site_url == "https://owner.github.io/name/latest/"
    other = configured(tmp_path, "https://host/owner/name")  # not on GitHub Pages
    assert (other.repo_name, other.site_url) == ("owner/name", None)
    assert not hasattr(configured(tmp_path, ""), "repo_url")


def test_the_site_has_search_versions_edit_links_and_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "content.action.edit" in text
    assert "provider: mike" in text
    assert "  - search\n" in text
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("integrations/")}
    assert [page for page in sorted(pages) if f": {page}\n" not in text] == []


def test_the_card_shows_what_was_measured() -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks/draw_card.py"))
    measured = json.loads((ROOT / "benchmarks/results/ttft-float32.json").read_text("utf-8"))
    with Image.open(ROOT / "docs/figures/card.png") as card:
        assert card.size == (1200, 630)
        assert card.info["Description"] == "; ".join(draw["lines"](measured))


def test_documentation_is_published_after_a_successful_release() -> None:
    folder = ROOT / ".github/workflows"
    site, release = (
        yaml.load((folder / name).read_text("utf-8"), yaml.BaseLoader)
        for name in ("docs.yml", "release.yml")
    )
    assert site["on"] == {"workflow_run": {"workflows": [release["name"]], "types": ["completed"]}}
    (job,) = site["jobs"].values()
    assert job["if"] == "github.event.workflow_run.conclusion == 'success'"
    assert job["steps"][0]["with"]["ref"] == "${{ github.event.workflow_run.head_sha }}"
