"""Check whether a release can be published, and whether the built packages are complete.

Usage:
    python .ci/check_release.py ready [--tag v0.1.0] [--warn]    # before building
    python .ci/check_release.py built dist                       # after building
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("blockattn-rag", "langchain-blockattn", "llama-index-llms-blockattn")
PAGES = ("README.md", "SECURITY.md", *(f"packages/{name}/README.md" for name in PACKAGES[1:]))
EARLY = re.compile(r" ?[^.\n]*(?:[Nn]ot on PyPI yet|Until the first release)[^.]*\.|\bADDRESS\b")
"""Sentences of ``PAGES`` that only apply before the first release, and the ADDRESS placeholder."""
MAX_WHEEL_BYTES = 12_000_000
IN_SDIST = {"Makefile", "hatch_build.py", "README.md", "constraints.txt", "tests", "docs", ".ci"}


def version(root: Path) -> str:
    """Return the version of all packages: ``__version__`` of the module."""
    text = (root / "blockattn_rag/__init__.py").read_text("utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def unready(root: Path, tag: str | None = None) -> list[str]:
    """List what prevents a release, and how to fix it.

    Args:
        root: Root of the repository.
        tag: Tag to compare with the version. Default: no comparison.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    address, number = settings["tool"]["blockattn"]["address"], version(root)
    faults = []
    if not address:
        faults.append(
            'The repository has no address: set "address" of [tool.blockattn] in pyproject.toml'
        )
    elif not re.fullmatch(r"https://[^/\s]+/[^/\s]+/[^/\s]+", address):
        faults.append(f"Expected an address such as https://github.com/OWNER/NAME, found {address}")
    changes = (root / "CHANGELOG.md").read_text("utf-8")
    heading = rf"^## {re.escape(number)} - \d{{4}}-\d{{2}}-\d{{2}}\n+(.*?)(?=^## |\Z)"
    section = re.search(heading, changes, re.MULTILINE | re.DOTALL)
    if section is None:
        faults.append(
            f'CHANGELOG.md has no section "## {number} - YYYY-MM-DD": rename "## Unreleased" to it'
        )
    elif not section[1].strip():
        faults.append(f"The section {number} of CHANGELOG.md is empty: describe the changes")
    faults += [
        f"{name} describes the time before the release: describe how to install from PyPI"
        for name in PAGES
        if EARLY.search((root / name).read_text("utf-8"))
    ]
    recipe = (root / "deploy/conda-forge/recipe.yaml").read_text("utf-8")
    if not re.search(rf'^\s*version: "?{re.escape(number)}"?$', recipe, re.MULTILINE):
        faults.append(f"deploy/conda-forge/recipe.yaml has another version: expected {number}")
    if f"version: {number}\n" not in (root / "CITATION.cff").read_text("utf-8"):
        faults.append(f"CITATION.cff has another version: expected {number}")
    if tag is not None and tag != f"v{number}":
        faults.append(f"The tag {tag} is not v{number}: tag the commit that has this __version__")
    return faults


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def incomplete(folder: Path) -> list[str]:
    """List what is wrong with the wheels and sdists in a folder.

    Expects exactly one wheel and one sdist per package, all with the same version, wheels of at
    most ``MAX_WHEEL_BYTES``, READMEs without relative links, and a main sdist with ``IN_SDIST``.
    """
    number = version(ROOT)
    stems = [f"{name.replace('-', '_')}-{number}" for name in PACKAGES]
    expected = {f"{stem}{end}" for stem in stems for end in ("-py3-none-any.whl", ".tar.gz")}
    found = {path.name for path in folder.iterdir()}
    faults = [f"{folder} has no {name}" for name in sorted(expected - found)]
    faults += [f"Unexpected file in {folder}: {name}" for name in sorted(found - expected)]
    for wheel in sorted(folder.glob("*.whl")):
        size = wheel.stat().st_size
        if size > MAX_WHEEL_BYTES:
            faults.append(f"{wheel.name} has {size:,} bytes: expected at most {MAX_WHEEL_BYTES:,}")
        faults += [
            f"Relative link in the README of {wheel.name}: {target}"
            for target in re.findall(r"\]\(([^)]+)\)", str(metadata_of(wheel).get_payload()))
            if not re.match(r"https?:|#", target)
        ]
    sdist = folder / f"{stems[0]}.tar.gz"
    if sdist.exists():
        with tarfile.open(sdist) as archive:
            names = {Path(member).parts[1] for member in archive.getnames() if "/" in member}
        faults += [f"{sdist.name} has no {name}" for name in sorted(IN_SDIST - names)]
    return faults


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    ready = commands.add_parser(
        "ready", help="Check whether the repository is ready to be published."
    )
    ready.add_argument("--tag", help="Tag of the release.")
    ready.add_argument("--warn", action="store_true", help="Only print what is missing.")
    built = commands.add_parser("built", help="Check whether the built packages are complete.")
    built.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "ready":
        faults = unready(ROOT, options.tag)
        label = "warning" if options.warn else "error"
        print("\n".join(f"{label}: {fault}" for fault in faults) or "Ready to be published")
        return 0 if options.warn else bool(faults)
    faults = incomplete(options.folder)
    print("\n".join(f"error: {fault}" for fault in faults) or "All packages are complete")
    for path in sorted(options.folder.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
