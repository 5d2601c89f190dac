"""Run the "build" job of the publishing workflow on this machine, without uploading anything.

Usage: python .ci/rehearse_release.py [--address https://github.com/OWNER/NAME] [--keep FOLDER]

The steps run in a copy of the tracked files whose address, changelog and READMEs are prepared for
the release. Steps that use an action, such as the upload, or that have a condition, are listed
but not run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from check_release import EARLY, PAGES, ROOT, version

WORKFLOW = ".github/workflows/release.yml"


def copy(folder: Path) -> None:
    """Copy the tracked files, with uncommitted changes, into an empty folder."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"Expected {old!r} once in {path.name}, found it {text.count(old)} times")
    path.write_text(text.replace(old, new), "utf-8")


def prepare(folder: Path, address: str) -> None:
    """Prepare a copy for the release: set the address, date the changelog, update the READMEs."""
    project = folder / "pyproject.toml"
    if 'address = ""\n' in project.read_text("utf-8"):
        replace(project, 'address = ""\n', f'address = "{address}"\n')
    changes = folder / "CHANGELOG.md"
    if "\n## Unreleased\n" in changes.read_text("utf-8"):
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        replace(changes, "\n## Unreleased\n", f"\n## {version(folder)} - {today}\n")
    for name in PAGES:
        page = folder / name
        text = EARLY.sub(lambda found: address * (found[0] == "ADDRESS"), page.read_text("utf-8"))
        page.write_text(text, "utf-8")


def rehearse(folder: Path) -> int:
    """Run the steps in order. Returns the exit status of the first step that fails, or 0."""
    workflow = yaml.safe_load((folder / WORKFLOW).read_text("utf-8"))
    tag = f"v{version(folder)}"
    for number, step in enumerate(workflow["jobs"]["build"]["steps"], 1):
        if "run" not in step or "if" in step:
            what = step.get("uses", step.get("name"))
            print(f"== step {number}: {what} (not run here)", flush=True)
            continue
        print(f"== step {number}: {step['run']}", flush=True)
        # The index of CPU builds that the workflow uses may be unreachable from this machine.
        environment = {**step.get("env", {}), **os.environ, "GITHUB_REF_NAME": tag}
        environment["TORCH_INDEX"] = os.environ.get("TORCH_INDEX", "")
        start = time.perf_counter()
        done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=environment)
        print(f"== step {number}: exit {done.returncode}, {time.perf_counter() - start:.0f} s")
        if done.returncode:
            return done.returncode
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    example = "https://github.com/OWNER/blockattn_rag"
    parser.add_argument(
        "--address", default=example, help="Address to use if pyproject.toml has none."
    )
    parser.add_argument(
        "--keep", type=Path, help="Empty folder for the copy. Default: a temporary folder."
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"{folder} is not empty")
        copy(folder)
        prepare(folder, options.address)
        return rehearse(folder)


if __name__ == "__main__":
    sys.exit(main())
