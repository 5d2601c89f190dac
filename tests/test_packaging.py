"""How package indexes display the project."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from blockattn_rag import __version__

ROOT = Path(__file__).parents[1]
Portable = Callable[..., str]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture
def portable() -> Portable:
    pytest.importorskip("hatchling")
    function: Portable = runpy.run_path(str(ROOT / "hatch_build.py"))["portable"]
    return function


def test_links_in_the_readme_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README)
    local = [target for target in targets if not target.startswith("https:")]
    assert len(local) > 20
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_packaged_readme_links_are_absolute(portable: Portable) -> None:
    text = portable(
        "![a](docs/a.svg) [b](docs/b.md#c) [d](https://d) [e](#f)", "https://h/o/n", "2.0"
    )
    assert text == (
        "![a](https://h/o/n/raw/v2.0/docs/a.svg) [b](https://h/o/n/blob/v2.0/docs/b.md#c) "
        "[d](https://d) [e](#f)"
    )
    targets = re.findall(r"\]\(([^)]+)\)", portable(README, "https://h/o/n", "2.0"))
    assert [target for target in targets if not target.startswith(("https:", "#"))] == []


def test_links_of_a_readme_in_a_folder_lead_to_the_repository(portable: Portable) -> None:
    text = portable("[a](../../docs/b.md#c)", "https://h/o/n", "2.0", "packages/name")
    assert text == "[a](https://h/o/n/blob/v2.0/docs/b.md#c)"


def test_without_an_address_the_packaged_readme_has_no_links(portable: Portable) -> None:
    assert portable("![a](a.svg)[b](b.md), [d](https://d)", "", "2.0") == "b, [d](https://d)"


def test_the_citation_has_the_current_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (__version__, project["license"])


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda f: f.name)
def test_github_files_are_valid_yaml(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text("utf-8")), dict)


def test_the_workflow_runs_the_gate() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = workflow["jobs"]["gate"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]
