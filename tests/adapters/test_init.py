"""Packages of the adapters: imported on first use, with an error that names the missing extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

EACH = pytest.mark.parametrize(
    ("package", "name", "needed"),
    [
        ("llama_index", "BlockAttentionLLM", "llama_index"),
        ("langchain", "ChatBlockAttention", "langchain_core"),
    ],
)


def output_of(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@EACH
def test_import_loads_no_torch_and_no_framework(package: str, name: str, needed: str) -> None:
    found = output_of(
        f"import sys, blockattn_rag.{package}\n"
        f"print([one for one in ('torch', 'transformers', {needed!r}) if one in sys.modules])"
    )
    assert found == "[]"


@EACH
def test_a_missing_package_names_the_extra(package: str, name: str, needed: str) -> None:
    found = output_of(
        f"import sys; sys.modules[{needed!r}] = None\n"
        f"import blockattn_rag.{package} as adapter\n"
        f"try: adapter.{name}\nexcept ImportError as error: print(error)"
    )
    extra = package.replace("_", "-")
    assert f'pip install -c constraints.txt -e ".[{extra}]"' in found


@EACH
def test_only_servers_need_the_extra_serving(package: str, name: str, needed: str) -> None:
    found = output_of(
        f"import sys; sys.modules['openai'] = None\n"
        f"import blockattn_rag.{package} as adapter\n"
        f"adapter.{name}\n"
        f"try: adapter.served_llm\nexcept ImportError as error: print(error)"
    )
    assert 'pip install -c constraints.txt -e ".[serving]"' in found
