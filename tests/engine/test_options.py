"""Options are parsed and checked once, and are compared as a whole."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import save_merge
from blockattn_rag.engine.options import GenerateOptions, check_names, checked_option
from blockattn_rag.model.sampling import Sampling

DEFAULTS = GenerateOptions(on_miss="error", assembly="copy")


def parse(**options: Any) -> GenerateOptions:
    return GenerateOptions.parse(options, DEFAULTS)


def test_what_is_not_said_is_the_engines_own() -> None:
    assert parse() == DEFAULTS
    assert parse(on_miss=None, positions=None).on_miss == "error"
    assert parse(on_miss="compute").on_miss == "compute"


def test_arguments_go_where_they_belong_and_the_rest_to_transformers() -> None:
    found = parse(mode="full", temperature=0.5, stop="END", num_beams=2)
    assert found.mode == "full"
    assert found.sampling == Sampling(temperature=0.5, stop=("END",), extra={"num_beams": 2})
    assert parse(stop=None).sampling.stop == ()


@pytest.mark.parametrize(
    ("name", "meant"), [("sinkk", "sink"), ("promot", "promote"), ("temprature", "temperature")]
)
def test_a_misspelt_option_is_told(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"unknown option '{name}' .did you mean '{meant}'"):
        parse(**{name: 1})


@pytest.mark.parametrize("name", ["min_new_tokens", "top_h", "synced_gpus"])
def test_what_transformers_knows_is_no_misspelt_option(name: str) -> None:
    assert parse(**{name: 1}).sampling.extra == {name: 1}


@pytest.mark.parametrize(
    ("name", "found"),
    [("sink", "head"), ("merge", "more:2"), ("merge", "no.safetensors"), ("promote", "best")],
)
def test_a_repair_of_no_known_form_is_refused(name: str, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        parse(**{name: found})


def test_a_number_of_passages_is_taken_as_its_form() -> None:
    assert parse(promote=2) == parse(promote="2")
    assert parse(promote=0) == parse()


def test_a_reader_whose_folder_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found no folder"):
        parse(reader=tmp_path / "nowhere")
    assert parse(reader=tmp_path).reader == str(tmp_path)


def test_files_below_the_home_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "reader").mkdir()
    merge = LearnedMerge(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 2, 3))
    save_merge(merge, tmp_path / "merge.safetensors", "f")
    found = parse(reader="~/reader", merge="~/merge.safetensors")
    assert (found.reader, found.merge) == ("~/reader", "~/merge.safetensors")


def test_one_option_is_checked_by_itself() -> None:
    assert checked_option("promote", 2) == "2"
    assert checked_option("promote", None) is None
    with pytest.raises(ValueError, match="found 'best'"):
        checked_option("promote", "best")


def test_names_that_are_no_block_options_are_refused_where_nothing_else_is_taken() -> None:
    check_names({"sink": "bos", "reader": None})
    with pytest.raises(TypeError, match=r"unknown options sinks; known are on_miss.*reader"):
        check_names({"sinks": "bos"})


@pytest.mark.parametrize("name", ["mode", "on_miss", "positions", "assembly"])
def test_an_unknown_word_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of .*; found 'nonsense'"):
        parse(**{name: "nonsense"})


def test_equal_options_are_equal_and_others_are_not() -> None:
    assert parse(top_k=1, num_beams=2) == parse(num_beams=2, top_k=1)
    assert parse(top_k=1) != parse(top_k=2)
    assert parse() != "options"


def test_options_that_cannot_be_compared_are_unequal() -> None:
    bias = torch.ones(2)
    one, other = parse(bias=bias), parse(bias=torch.ones(2))
    assert one == one
    assert one != other


def test_options_are_not_written_to() -> None:
    with pytest.raises(FrozenInstanceError):
        parse().mode = "full"  # type: ignore[misc]
