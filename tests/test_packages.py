"""All packages of the repository can be built, installed and used as wheels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import blockattn_rag
import blockattn_rag.langchain
import blockattn_rag.llama_index

ROOT = Path(__file__).parents[1]
MODULES = {
    "langchain-blockattn": "langchain_blockattn",
    "llama-index-llms-blockattn": "llama_index.llms.blockattn",
}
FOLDERS = [ROOT, *(ROOT / "packages" / name for name in MODULES)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheels of all three packages."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheels")
    arguments = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    folders = [str(path) for path in FOLDERS]
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "-w", str(folder), *folders], check=True
    )
    return folder


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the wheels are installed into, without dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    arguments = ["install", "--no-deps", "--no-index", "--quiet", "--target", str(folder)]
    files = [str(path) for path in wheels.iterdir()]
    subprocess.run([sys.executable, "-m", "pip", *arguments, *files], check=True)
    return folder


def run(code: str, installed: Path, folder: Path) -> str:
    """Run a program that imports the installed wheels instead of the repository. Returns stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def test_all_packages_have_the_version_of_the_module(wheels: Path) -> None:
    found = {metadata(wheel)["Name"]: metadata(wheel)["Version"] for wheel in wheels.iterdir()}
    assert found == dict.fromkeys(["blockattn-rag", *MODULES], blockattn_rag.__version__)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("langchain-blockattn", "langchain"), ("llama-index-llms-blockattn", "llama-index")],
)
def test_a_package_requires_the_same_version_of_the_main_package(
    wheels: Path, name: str, extra: str
) -> None:
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    requirement = f"blockattn-rag[{extra}]=={blockattn_rag.__version__}"
    assert metadata(wheel).get_all("Requires-Dist") == [requirement]
    with ZipFile(next(wheels.glob("blockattn_rag-*.whl"))) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        assert f"Provides-Extra: {extra}\n" in archive.read(path).decode("utf-8")


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_an_installed_package_exports_the_names_of_its_adapter(
    name: str, module: str, installed: Path, tmp_path: Path
) -> None:
    adapter = blockattn_rag.langchain if "langchain" in name else blockattn_rag.llama_index
    code = (
        f"import {module} as package, {adapter.__name__} as adapter\n"
        "print(adapter.__file__)\n"
        "print(*dir(package))\n"
        "print(all(getattr(package, n) is getattr(adapter, n) for n in dir(package)))\n"
        "print(hasattr(package, 'lazy_names'))\n"
    )
    file, names, same, other = run(code, installed, tmp_path).splitlines()
    assert Path(file).is_relative_to(installed)
    assert (same, other) == ("True", "False")
    assert set(names.split()) == set(adapter.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_the_code_of_a_readme_runs_with_the_installed_wheels(
    name: str, installed: Path, tmp_path: Path
) -> None:
    readme = (ROOT / "packages" / name / "README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert "214 metres" in run(code, installed, tmp_path)
    assert any((tmp_path / "kv").rglob("*.safetensors"))


def test_the_llama_index_package_does_not_close_the_namespace(wheels: Path) -> None:
    with ZipFile(next(wheels.glob("llama_index_*.whl"))) as archive:
        files = [n for n in archive.namelist() if n.endswith(".py")]
    assert files == ["llama_index/llms/blockattn/__init__.py"]


def test_the_llamahub_metadata_lists_the_exported_names() -> None:
    text = (ROOT / "packages/llama-index-llms-blockattn/pyproject.toml").read_text("utf-8")
    hub = tomllib.loads(text)["tool"]["llamahub"]
    assert hub["import_path"] == MODULES["llama-index-llms-blockattn"]
    assert set(hub["class_authors"]) <= set(blockattn_rag.llama_index.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_packages_link_to_existing_files_and_contain_the_license(name: str) -> None:
    folder = ROOT / "packages" / name
    targets = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text("utf-8"))
    assert targets
    assert [target for target in targets if not (folder / target).exists()] == []
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
