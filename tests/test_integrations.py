"""The pages and table rows for LangChain and LlamaIndex are correct, and their code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import blockattn_rag.langchain
from tests.langchain.test_standard import UnderTest
from tests.test_documentation import missing, promised

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/integrations"
FLAGS = {"stream", "tool_calling", "structured_output", "multimodal"}


def rows() -> dict[str, list[dict[str, Any]]]:
    text = (FOLDER / "langchain_external_docs.yaml").read_text("utf-8")
    table: dict[str, list[dict[str, Any]]] = yaml.safe_load(text)["python"]
    return table


def test_the_langchain_row_only_claims_what_the_standard_tests_check() -> None:
    (row,) = rows()["chat"]
    assert row.keys() == {"name", "pypi", "docs_url"} | FLAGS
    assert row["tool_calling"] is UnderTest.has_tool_calling
    assert row["structured_output"] is UnderTest.has_structured_output
    inputs = ("image_inputs", "audio_inputs", "pdf_inputs", "video_inputs")
    assert row["multimodal"] is any(hasattr(UnderTest, f"supports_{name}") for name in inputs)


def test_rows_name_classes_of_a_package_that_exists() -> None:
    for row in [row for table in rows().values() for row in table]:
        assert row["name"] in blockattn_rag.langchain.__all__
        assert (ROOT / "packages" / row["pypi"] / "pyproject.toml").exists()
        assert row["docs_url"] == f"https://pypi.org/project/{row['pypi']}/"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["langchain_chat.mdx", "llama_index_llm.md"])
def test_code_of_a_page_runs_and_prints_the_documented_output(page: str, tmp_path: Path) -> None:
    text = (FOLDER / page).read_text("utf-8")
    blocks = re.findall(r"^```python.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    code = "\n".join(blocks)
    packages = [str(folder) for folder in (ROOT / "packages").iterdir()]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *packages])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert promised(code)
    assert missing(promised(code), done.stdout) == [], done.stdout


def test_the_standard_tests_of_langchain_run_without_expected_failures() -> None:
    text = (ROOT / "tests/langchain/test_standard.py").read_text("utf-8")
    assert "xfail" not in text
    assert "skip" not in text
