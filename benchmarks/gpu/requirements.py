"""Print the package requirements that are not met in this interpreter's environment."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def unmet(requirements: list[str]) -> list[str]:
    """Return a line for each requirement that is missing or has the wrong version."""
    lines = []
    for requirement in map(Requirement, requirements):
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found == "nothing" or not requirement.specifier.contains(found, prereleases=True):
            lines.append(f"found {found}, expected {requirement}")
    return lines


if __name__ == "__main__":
    declared = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["dependencies"]
    missing = unmet(declared)
    print("\n".join(missing or ["all requirements are met"]))
    sys.exit(bool(missing))
