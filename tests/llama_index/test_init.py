"""The package's face: lazy names, and an error that says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import blockattn_rag.llama_index as adapters

WITHOUT = """
import sys
sys.modules[{name!r}] = None
import blockattn_rag.llama_index as adapters
try:
    adapters.BlockAttentionLLM
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("name", adapters.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(adapters, name) is not None
    assert name in dir(adapters)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nope"):
        adapters.Nope  # noqa: B018


def test_importing_loads_neither_torch_nor_llama_index() -> None:
    code = (
        "import sys, blockattn_rag.llama_index\n"
        "print([m for m in ('torch', 'transformers', 'llama_index') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_missing_package_names_the_extra() -> None:
    code = WITHOUT.format(name="llama_index")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install -c constraints.txt -e ".[llama-index]"' in run.stdout
