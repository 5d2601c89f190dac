"""Check built packages: no relative links in the README of the metadata, no file missing."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

EXPECTED = {"Makefile", "hatch_build.py", "README.md", "constraints.txt", "tests", "docs", ".ci"}


def main(folder: Path) -> int:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode("utf-8")
    with tarfile.open(sdist) as archive:
        found = {Path(member).parts[1] for member in archive.getnames() if "/" in member}
    faults = [
        f"relative link in the README of {wheel.name}: {target}"
        for target in re.findall(r"\]\(([^)]+)\)", metadata)
        if not re.match(r"https?:|#", target)
    ]
    faults += [f"{sdist.name} has no {name}" for name in sorted(EXPECTED - found)]
    if "Project-URL" not in metadata:
        print("note: pyproject.toml has no address of the repository: no project URLs")
    print("\n".join(faults) or f"{wheel.name} and {sdist.name} are complete")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
