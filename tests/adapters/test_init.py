"""Adapter packages are imported on first use, and the error for a missing one names its extra."""

from __future__ import annotations

import importlib
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


@EACH
def test_a_missing_package_names_the_extra(package: str, name: str, needed: str) -> None:
    code = (
        f"import sys; sys.modules[{needed!r}] = None\n"
        f"import blockattn_rag.{package} as adapter\n"
        f"try: adapter.{name}\nexcept ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extra = package.replace("_", "-")
    assert f'pip install -c constraints.txt -e ".[{extra}]"' in run.stdout


@EACH
def test_only_servers_need_the_serving_extra(
    package: str, name: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = f"blockattn_rag.{package}.served"
    foreign = ("langchain_openai", "llama_index.llms.openai", "openai")
    for module in [module for module in sys.modules if module.startswith((served, *foreign))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "openai", None)
    adapter = importlib.import_module(f"blockattn_rag.{package}")
    monkeypatch.delattr(adapter, "served", raising=False)
    assert getattr(adapter, name)
    with pytest.raises(ImportError, match=r'pip install -c constraints.txt -e "\.\[serving\]"'):
        _ = adapter.served_llm
