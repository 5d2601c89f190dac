from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.check.model import CheckReport, CheckRow
from blockattn_rag.model import BlockModel
from tests.app.cli.conftest import Command
from tests.fake_server import FakeServer
from tests.recipes import recipe_of


def test_check_of_a_supported_model_exits_0(cli: Command, model: Path) -> None:
    report = cli("check", model, "--json")
    assert report.json["passed"]
    assert not report.json["block_tuned"]
    assert {row["name"] for row in report.json["rows"]} >= {
        "layers", "one block = full attention", "assembled = oracle", "tokenizer boundary",
    }  # fmt: skip


def test_check_accepts_a_recipe(
    cli: Command, model: Path, loaded: BlockModel, tmp_path: Path
) -> None:
    recipe_of(loaded).save(tmp_path / "recipe")
    plain = cli("check", model, "--json").json
    report = cli("check", model, "--recipe", tmp_path / "recipe", "--json")
    assert len(report.json["rows"]) > len(plain["rows"])
    assert report.json["recipe"].startswith("head:4+adapter:")
    assert plain["recipe"] is None


def test_failed_row_exits_1(cli: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = CheckRow("assembled = oracle", False, 0.5, None, "made to fail")
    monkeypatch.setattr(
        "blockattn_rag.check.model.check_model", lambda m, _: CheckReport(m.name, (row,))
    )
    output = cli("check", model, status=1)
    assert "NOT usable in block mode" in output.stdout
    assert cli("check", model, "--json", status=1).json["rows"][0]["budget"] is None


def test_a_server_is_checked_in_both_modes(cli: Command, server: FakeServer) -> None:
    output = cli("check", "--server", server.url)
    assert output.stdout.startswith(server.url)
    assert "block mode answers" in output.stdout
    assert "works correctly in block mode; not block-fine-tuned" in output.stdout
    report = cli("check", "--server", server.url, "--json").json
    assert (report["server"], report["passed"]) == (server.url, True)
    for mode in ("block", "full"):
        assert report[mode] in output.stdout
    assert "the-secret" not in output.stdout


def test_a_server_with_wrong_answers_exits_1(cli: Command, server: FakeServer) -> None:
    server.report = {"misses": 1}
    output = cli("check", "--server", server.url, status=1)
    assert "does NOT work correctly in block mode" in output.stdout


def test_a_read_only_server_is_checked_in_full_mode(
    cli: Command, loaded: BlockModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeServer(loaded, read_only=True).listening() as server:
        output = cli("check", "--server", server.url)
    assert "block mode was not checked: the server is read-only" in output.stdout
