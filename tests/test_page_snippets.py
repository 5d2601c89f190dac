"""Code blocks of the documentation that cannot run on their own, which are marked ``py``. They need
a server, a hub, an account or a trained model. Those that need a server run here with
``FakeServer``, which parses requests with the code of the real server. All others are compiled and
checked: imports exist, names are defined on the page or listed here, and arguments are accepted by
this package. ``test_documentation.py`` runs the blocks that are marked ``python``."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blockattn_rag
import blockattn_rag.langchain
import blockattn_rag.llama_index
from blockattn_rag.model import BlockModel
from tests.fake_server import FakeServer
from tests.test_documentation import PAGES, code_of, run_code

WITH_CODE = [page for page in PAGES if code_of(page, "py")]
# Names that are introduced by the text of a page.
KNOWN = {
    "agents": {"chat", "get_weather", "llm", "tool", "index", "FORMATS", "parse_answer"},
    "settings": {"ChatBlockAttention", "BlockAttentionLLM", "messages"},
    "structured_output": {"served_llm"},
}
KNOWN["agents"] |= {"engine", "prompt", "names", "ChatBlockAttention"}
# Packages that the reader installs, and that this project does not use.
FOREIGN = {"openinference", "opentelemetry"}
# Pages whose blocks need a server. The page on structured output is missing, because `FakeServer`
# cannot force tool calls.
SERVED = ["openai_clients", "serving_vllm"]


def names_of(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that code reads, and the names that it defines, in any scope."""
    read: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return read, defined


def parsed(code: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(code, "page", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def accepted(target: Any) -> set[str] | None:
    """Return the keyword arguments that a callable accepts. None: any."""
    parameters = inspect.signature(target).parameters.values()
    fields = {
        name
        for field_name, field in getattr(target, "model_fields", {}).items()
        for name in (field_name, field.alias)
        if name
    }
    if not fields and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return fields | {p.name for p in parameters}


def unknown_arguments(tree: ast.AST) -> list[str]:
    """Return keyword arguments that the called class or function does not accept."""
    homes = (blockattn_rag, blockattn_rag.langchain, blockattn_rag.llama_index)
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called)) if called != "served_llm":
                for home in homes:
                    if called in home.__all__:
                        known = accepted(getattr(home, called))
                        names = {keyword.arg for keyword in node.keywords if keyword.arg}
                        found += [f"{called}({name}=)" for name in names - (known or names)]
    return found


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_that_cannot_run_on_its_own_is_valid(page: Path) -> None:
    trees = [parsed(code) for code in code_of(page, "py")]
    around = parsed("\n".join(code_of(page, "python")))
    for module, name in (pair for tree in trees for pair in imported(tree)):
        try:
            home = importlib.import_module(module)
        except ModuleNotFoundError:
            assert module.split(".")[0] in FOREIGN, module
        else:
            assert not name or hasattr(home, name), f"{module}.{name}"
    known = names_of(around)[1] | KNOWN.get(page.stem, set()) | set(dir(builtins))
    for tree in trees:
        read, defined = names_of(tree)
        known |= defined
        assert read - known == set()
        assert unknown_arguments(tree) == []


def test_names_introduced_by_the_text_are_used() -> None:
    for stem, names in KNOWN.items():
        (page,) = (page for page in WITH_CODE if page.stem == stem)
        used = [names_of(parsed(code))[0] for code in code_of(page, "py")]
        assert names <= set().union(*used)


def test_invalid_code_is_detected() -> None:
    assert names_of(parsed("import a.b as c\nfor d in e: pass")) == ({"e"}, {"c", "d"})
    assert unknown_arguments(parsed("ChatBlockAttention(modell='m')")) == [
        "ChatBlockAttention(modell=)"
    ]
    assert unknown_arguments(parsed("BlockAttentionLLM(model_name='m', kv_store='kv')")) == []
    with pytest.raises(SyntaxError):
        parsed("print(")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    fake = FakeServer(BlockModel.from_pretrained("bundled", device="cpu"), name="bundled")
    with fake.listening():
        yield fake


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stem", SERVED)
def test_code_that_needs_a_server_runs_and_prints_the_documented_output(
    stem: str, server: FakeServer, tmp_path: Path
) -> None:
    (page,) = (page for page in WITH_CODE if page.stem == stem)
    code = "\n".join(code_of(page, "py"))
    code, replaced = re.subn(r"http://(?:gpu|127\.0\.0\.1):8000", server.url, code)
    assert replaced
    server.requests.clear()
    run_code(code, tmp_path, environment={"NO_PROXY": "127.0.0.1"})
    assert server.requests
