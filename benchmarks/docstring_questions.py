"""Questions about Python's standard library, with docstrings as passages: technical text, English
of another kind than an encyclopedia's, on every machine that has Python.

    python benchmarks/docstring_questions.py OUTPUT.jsonl [--samples 200] [--passages 5] [--seed 0]

Each question is about one function; its own docstring and those of other functions, drawn at
random, are its passages, in random order. Right is an answer that holds its first line.
The same Python release, numbers and seed give the same file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer

MODULES = (
    "argparse", "ast", "asyncio", "bisect", "calendar", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "dis", "email.utils", "enum",
    "fractions", "functools", "getpass", "glob", "gzip", "hashlib", "heapq", "html", "http.client",
    "imaplib", "inspect", "io", "itertools", "json", "linecache", "locale", "logging", "mimetypes",
    "os", "os.path", "pathlib", "pickle", "platform", "pprint", "queue", "random", "re", "secrets",
    "shlex", "shutil", "smtplib", "socket", "sqlite3", "ssl", "statistics", "string", "struct",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "tokenize", "traceback",
    "typing", "unicodedata", "unittest", "urllib.parse", "urllib.request", "uuid", "weakref",
    "zipfile",
)  # fmt: skip

FEWEST, MOST = 200, 1500
"""Characters of a docstring that is a passage."""


def docstrings() -> dict[str, str]:
    """The docstrings of public functions and of classes' public methods, by qualified name."""
    found: dict[str, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, member in _public(module):
            if inspect.isclass(member):
                for method, function in _public(member):
                    found[f"{module_name}.{name}.{method}"] = inspect.getdoc(function) or ""
            found[f"{module_name}.{name}"] = inspect.getdoc(member) or ""
    distinct = {text: name for name, text in sorted(found.items(), reverse=True)}
    return {
        name: text
        for text, name in sorted(distinct.items(), key=lambda item: item[1])
        if FEWEST <= len(text) <= MOST and "\n" in text
    }


def _public(of: Any) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in vars(of).items() if n[0] != "_" and callable(m)]


def samples(number: int, passages: int, seed: int) -> list[dict[str, Any]]:
    """As ``blockattn-rag eval`` reads them."""
    texts = docstrings()
    draw = random.Random(seed)
    asked = draw.sample(sorted(texts), number)
    made = []
    for name in asked:
        others = draw.sample([other for other in sorted(texts) if other != name], passages - 1)
        shown = [name, *others]
        draw.shuffle(shown)
        made.append(
            {
                "id": name,
                "question": f"What does {name} do?",
                "answers": [texts[name].splitlines()[0]],
                "passages": [
                    {"title": one, "text": texts[one], "gold": one == name} for one in shown
                ],
            }
        )
    return made


def main(
    output: Path,
    num_samples: Annotated[int, typer.Option("--samples")] = 200,
    passages: int = 5,
    seed: int = 0,
) -> None:
    lines = [json.dumps(sample) for sample in samples(num_samples, passages, seed)]
    output.write_text("\n".join(lines) + "\n")
    typer.echo(f"{len(lines)} questions with {passages} passages each in {output}")


if __name__ == "__main__":
    typer.run(main)
