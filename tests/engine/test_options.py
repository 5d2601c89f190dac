"""Options of a call: parsing, validation and comparison."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.model.sampling import Sampling


def parse(**options: Any) -> GenerateOptions:
    return GenerateOptions.parse(options, options.get("recipe", Recipe()))


def test_unset_options_have_defaults() -> None:
    assert parse() == parse(mode=None) == GenerateOptions()


def test_arguments_of_transformers_are_passed_on() -> None:
    found = parse(mode="full", temperature=0.5, stop="END", num_beams=2)
    assert found.mode == "full"
    assert found.sampling == Sampling(temperature=0.5, stop=("END",), extra={"num_beams": 2})
    assert parse(stop=None).sampling.stop == ()


@pytest.mark.parametrize(("name", "meant"), [("recipee", "recipe"), ("temprature", "temperature")])
def test_a_misspelled_option_raises_type_error(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"Unknown option '{name}': did you mean '{meant}'"):
        parse(**{name: 1})


@pytest.mark.parametrize("name", ["on_miss", "assembly", "positions"])
def test_engine_settings_are_refused_as_call_options(name: str) -> None:
    with pytest.raises(TypeError, match=rf"'{name}' is a setting of the engine.*, {name}=\.\.\.\)"):
        parse(**{name: "nonsense"})


def test_options_are_compared_by_value() -> None:
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


def test_options_of_the_caller_are_not_modified() -> None:
    with pytest.raises(FrozenInstanceError):
        parse().mode = "full"  # type: ignore[misc]
