"""Options are parsed and checked once, and are compared as a whole."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.model.sampling import Sampling

DEFAULTS = GenerateOptions(on_miss="error", assembly="copy")


def parse(**options: Any) -> GenerateOptions:
    return GenerateOptions.parse(options, DEFAULTS)


def test_what_is_not_said_is_the_engines_own() -> None:
    assert parse() == DEFAULTS
    assert parse(on_miss=None, recipe=None).on_miss == "error"
    assert parse(on_miss="compute").on_miss == "compute"


def test_arguments_go_where_they_belong_and_the_rest_to_transformers() -> None:
    found = parse(mode="full", temperature=0.5, stop="END", num_beams=2)
    assert found.mode == "full"
    assert found.sampling == Sampling(temperature=0.5, stop=("END",), extra={"num_beams": 2})
    assert parse(stop=None).sampling.stop == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("recipee", "recipe"), ("asembly", "assembly"), ("temprature", "temperature")],
)
def test_a_misspelt_option_is_told(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"unknown option '{name}' .did you mean '{meant}'"):
        parse(**{name: 1})


@pytest.mark.parametrize("name", ["min_new_tokens", "top_h", "synced_gpus"])
def test_what_transformers_knows_is_no_misspelt_option(name: str) -> None:
    assert parse(**{name: 1}).sampling.extra == {name: 1}


@pytest.mark.parametrize("name", ["mode", "on_miss", "assembly"])
def test_an_unknown_word_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of .*; found 'nonsense'"):
        parse(**{name: "nonsense"})


def test_equal_options_are_equal_and_others_are_not() -> None:
    assert parse(top_k=1, num_beams=2) == parse(num_beams=2, top_k=1)
    assert parse(top_k=1) != parse(top_k=2)
    assert parse(recipe=Recipe("bos")) == parse(recipe=Recipe("bos", source="elsewhere"))
    assert parse(recipe=Recipe("bos")) != parse()
    assert parse() != "options"


def test_options_that_cannot_be_compared_are_unequal() -> None:
    bias = torch.ones(2)
    one, other = parse(bias=bias), parse(bias=torch.ones(2))
    assert one == one
    assert one != other


def test_options_are_not_written_to() -> None:
    with pytest.raises(FrozenInstanceError):
        parse().mode = "full"  # type: ignore[misc]
