"""The release scripts refuse releases that are not ready and packages that are incomplete."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from blockattn_rag import __version__

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
PAGES = ("README.md", "SECURITY.md", *(f"packages/{name}/README.md" for name in (
    "langchain-blockattn", "llama-index-llms-blockattn")))  # fmt: skip
LOG = "# Changelog\n\n## "
STEMS = ("blockattn_rag", "langchain_blockattn", "llama_index_llms_blockattn")


def call(script: Path, *arguments: str, folder: Path = ROOT) -> tuple[int, str]:
    """Run a script of ``.ci``. Returns its exit status and output."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A copy of the files that the release check reads, all of them ready."""
    recipe = "deploy/conda-forge/recipe.yaml"
    for name in (".ci/check_release.py", "blockattn_rag/__init__.py", "CITATION.cff", recipe):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pyproject.toml").write_text('[tool.blockattn]\naddress = "https://h/o/n"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"{LOG}{__version__} - 2026-12-01\n\n- New.\n")
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pip install blockattn-rag")
    return tmp_path


def judged(repository: Path, *options: str) -> tuple[int, str]:
    return call(repository / ".ci/check_release.py", "ready", *options)


def test_a_ready_repository_passes(ready: Path) -> None:
    assert judged(ready, "--tag", f"v{__version__}") == (0, "Ready to be published\n")


def test_a_missing_address_is_only_a_warning_on_request(ready: Path) -> None:
    (ready / "pyproject.toml").write_text('[tool.blockattn]\naddress = ""\n')
    status, output = judged(ready, "--warn")
    assert (status, output[:8]) == (0, "warning:")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("pyproject.toml", '[tool.blockattn]\naddress = ""\n', 'set "address" of [tool.blockattn]'),
        (
            "pyproject.toml", '[tool.blockattn]\naddress = "https://h/n"\n',
            "https://github.com/OWNER/NAME, found https://h/n",
        ),
        (
            "deploy/conda-forge/recipe.yaml", 'context:\n  version: "0.0.1"\n',
            f"recipe.yaml has another version: expected {__version__}",
        ),
        ("CHANGELOG.md", f"{LOG}Unreleased\n\n- New.\n", 'rename "## Unreleased"'),
        ("CHANGELOG.md", f"{LOG}{__version__} - 2026-12-01\n\n## 0.0.1 - 2026-01-01\n", "is empty"),
        ("CHANGELOG.md", f"{LOG}{__version__}0 - 2026-12-01\n\n- New.\n", "has no section"),
        *(
            (page, text, f"{page} describes the time before the release")
            for page in PAGES
            for text in ("It is not on PyPI yet: wait.", "Until the first release, none.",
                         "git clone ADDRESS x")
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_not_ready_is_refused(
    ready: Path, file: str, text: str, message: str
) -> None:
    (ready / file).write_text(text)
    status, output = judged(ready)
    assert (status, output[:6]) == (1, "error:")
    assert message in output


def test_a_citation_or_tag_with_another_version_is_refused(ready: Path) -> None:
    path = ready / "blockattn_rag/__init__.py"
    path.write_text(path.read_text().replace(f'"{__version__}"', '"9.9.9"'))
    status, output = judged(ready, "--tag", f"v{__version__}")
    assert status == 1
    assert "CITATION.cff has another version: expected 9.9.9" in output
    assert f"The tag v{__version__} is not v9.9.9" in output


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., Path]:
    """Function that builds a folder of small but complete packages."""

    def make(*, readme: str = "[a](https://a)", size: int = 0, left_out: str = "") -> Path:
        folder = tmp_path / "dist"
        folder.mkdir()
        for stem in STEMS:
            with zipfile.ZipFile(folder / f"{stem}-{__version__}-py3-none-any.whl", "w") as wheel:
                text = f"Metadata-Version: 2.4\nName: {stem}\n\n{readme}\n"
                wheel.writestr(f"{stem}-{__version__}.dist-info/METADATA", text)
                wheel.writestr("module.py", b"#" * size)
            with tarfile.open(folder / f"{stem}-{__version__}.tar.gz", "w:gz") as sdist:
                names = {"Makefile", "hatch_build.py", "README.md", "constraints.txt", "tests/a"}
                for name in sorted(names | {"docs/a", ".ci/a"} - {left_out}):
                    sdist.addfile(tarfile.TarInfo(f"{stem}-{__version__}/{name}"))
        return folder

    return make


def test_complete_packages_pass(built: Callable[..., Path]) -> None:
    status, output = call(CI / "check_release.py", "built", str(built()))
    assert (status, output.splitlines()[0]) == (0, "All packages are complete")


def test_faults_of_built_packages_are_reported(built: Callable[..., Path]) -> None:
    folder = built(readme="[a](docs/a.md)", size=12_000_001, left_out=".ci/a")
    (folder / f"langchain_blockattn-{__version__}.tar.gz").rename(folder / "old.tar.gz")
    status, output = call(CI / "check_release.py", "built", str(folder))
    assert status == 1
    assert f"Relative link in the README of blockattn_rag-{__version__}" in output
    assert "expected at most 12,000,000" in output
    assert f"blockattn_rag-{__version__}.tar.gz has no .ci" in output
    assert f"has no langchain_blockattn-{__version__}.tar.gz" in output
    assert "Unexpected file" in output


def test_the_code_of_a_readme_runs_and_its_failure_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text('```python\nprint("smollm2")\n```\n\n```python\nraise SystemExit(3)\n```\n')
    status, output = call(CI / "run_readmes.py", "README.md", folder=tmp_path)
    assert status == 1
    assert "bundled" in output
    assert "block 2" in output
    page.write_text("no code")
    assert call(CI / "run_readmes.py", "README.md", folder=tmp_path)[0] == 1


def test_the_workflow_checks_before_it_publishes_and_uses_no_token() -> None:
    gate, build, *publishing = WORKFLOW["jobs"].values()
    assert gate["steps"][-1]["run"] == "bash .ci/run"
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert commands == [
        'git merge-base --is-ancestor "$GITHUB_SHA" origin/main',
        'python .ci/check_release.py ready --tag "$GITHUB_REF_NAME"',
        "make release",
    ]
    needed = ["gate", "build", "publish", "publish"]  # each job requires the one before it
    assert [job["needs"] for job in (build, *publishing)] == needed
    for job in publishing:
        assert job["permissions"] == {"attestations": "write", "id-token": "write"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text("utf-8")


def test_the_workflow_publishes_every_package_from_its_own_artifact() -> None:
    steps = WORKFLOW["jobs"]["build"]["steps"]
    uploads = {step["with"]["name"]: step["with"]["path"] for step in steps if "if-no" in str(step)}
    names = [stem.replace("_", "-") for stem in STEMS]
    assert uploads == {name: f"dist/{stem}-*" for name, stem in zip(names, STEMS, strict=True)}
    published = [job["steps"][0]["with"]["name"] for job in [*WORKFLOW["jobs"].values()][2:]]
    assert published == names


def test_the_rehearsal_runs_the_steps_of_the_workflow_in_a_copy(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    files = [".ci/rehearse_release.py", ".ci/check_release.py", "blockattn_rag/__init__.py"]
    files += ["CITATION.cff", "deploy/conda-forge/recipe.yaml", ".github/workflows/release.yml"]
    files += PAGES
    for name in files:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, repository / name)
    (repository / "pyproject.toml").write_text('[tool.blockattn]\naddress = ""\n')
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- New.\n")
    (repository / "Makefile").write_text("release:\n\t@echo built\n")
    subprocess.run("git init -q . && git add -A", shell=True, cwd=repository, check=True)
    script = repository / ".ci/rehearse_release.py"
    status, output = call(script, folder=repository)
    assert status == 0, output
    assert "Ready to be published" in output
    assert "built" in output
    assert "actions/upload-artifact" in output
    assert "## Unreleased" in (repository / "CHANGELOG.md").read_text()
    (repository / "Makefile").write_text("release:\n\t@exit 1\n")
    assert call(script, folder=repository)[0] != 0
