"""``blockattn-rag fingerprint``: the digits alone for scripts, the profile for servers."""

from __future__ import annotations

from pathlib import Path

from blockattn_rag.model import BlockModel
from blockattn_rag.server.measured_profile import profile_of
from blockattn_rag.server.profile import ModelProfile
from tests.app.cli.conftest import Command


def test_a_fingerprint_is_all_that_is_printed(cli: Command, model: Path) -> None:
    output = cli("fingerprint", model)
    loaded = BlockModel.from_pretrained(model, pack_weights=False)
    assert (output.status, output.stdout) == (0, loaded.fingerprint + "\n")


def test_a_profile_is_written_for_the_sink_and_dtype_that_were_asked_for(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    how = ("--sink", "head:4", "--dtype", "bfloat16")
    output = cli("fingerprint", model, *how, "--output", file, "--json")
    assert output.status == 0, output.stderr
    profile = ModelProfile.read(file)
    assert ModelProfile.from_dict(output.json) == profile
    loaded = BlockModel.from_pretrained(model, dtype="bfloat16", pack_weights=False)
    assert profile == profile_of(loaded, "head:4")
    assert (profile.dtype, profile.sink, profile.name) == ("bfloat16", "head:4", str(model))
    assert str(file) in output.stderr


def test_a_correction_has_no_place_in_a_profile(cli: Command, model: Path) -> None:
    output = cli("fingerprint", model, "--correction", "one.safetensors")
    assert output.status == 2
    assert "servers do not" in " ".join(output.stderr.split())


def test_what_cannot_be_measured_or_written_is_told(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    output = cli("fingerprint", model, "--sink", "first-block")
    assert output.status == 1
    assert "head:4" in output.stderr
    output = cli("fingerprint", model, "--output", tmp_path / "nowhere" / "profile.json")
    assert output.status == 2
    assert "no such folder" in output.stderr
