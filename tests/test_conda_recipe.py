"""The conda-forge recipe has the same version and dependencies as the packages."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from blockattn_rag import __version__

ROOT = Path(__file__).parents[1]
RECIPE = yaml.safe_load((ROOT / "deploy/conda-forge/recipe.yaml").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Names on PyPI, and the corresponding names on conda-forge.
CONDA_NAMES = {"huggingface-hub": "huggingface_hub", "torch": "pytorch", "xxhash": "python-xxhash"}
# Outputs of the recipe, and what the packages require on PyPI. The main output has the CLI.
EXPECTED = {
    "${{ name }}": [*PROJECT["dependencies"], *EXTRAS["cli"]],
    "langchain-blockattn": EXTRAS["langchain"],
    "llama-index-llms-blockattn": EXTRAS["llama-index"],
}
OUTPUTS = {output["package"]["name"]: output for output in RECIPE["outputs"]}


def constraints(words: str) -> tuple[str, frozenset[str]]:
    """Parse name and version limits of a conda requirement."""
    name, _, limits = words.partition(" ")
    return name, frozenset(limits.split(",")) - {""}


def in_conda(text: str) -> tuple[str, frozenset[str]]:
    """Parse name and version limits of a PyPI requirement."""
    requirement = Requirement(text)
    limits = frozenset(str(limit) for limit in requirement.specifier)
    return CONDA_NAMES.get(requirement.name, requirement.name), limits


@pytest.mark.parametrize("name", EXPECTED)
def test_an_output_has_the_requirements_of_its_package(name: str) -> None:
    run: list[str] = OUTPUTS[name]["requirements"]["run"]
    own = {"python >=${{ python_min }}", "${{ name }} ==${{ version }}"}
    found = [constraints(words) for words in run if words not in own]
    assert sorted(found, key=str) == sorted(map(in_conda, EXPECTED[name]), key=str)
    assert ("${{ name }} ==${{ version }}" in run) == (name != "${{ name }}")


def test_the_recipe_has_the_current_version_and_every_package() -> None:
    context: dict[str, Any] = RECIPE["context"]
    assert context["version"] == __version__
    assert f">={context['python_min']}" == PROJECT["requires-python"]
    assert {context["name"]} | {path.name for path in (ROOT / "packages").iterdir()} == {
        name.replace("${{ name }}", context["name"]) for name in OUTPUTS
    }
