from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from blockattn_rag.model import block_model, context_model, relay_attention
from blockattn_rag.prompts.markers import wrap
from blockattn_rag.store import DirectoryStore, MemoryStore
from tests.adapters.frameworks import EACH, Framework
from tests.engines import tuned_engine
from tests.models import tiny_model, tiny_tokenizer

pytestmark = EACH

TEXTS = ["The tower is tall.", "The lake is deep."]


def test_a_model_is_loaded_once_with_its_arguments(
    framework: Framework, saved: str, loads: list[Any], tmp_path: Path
) -> None:
    options = {"device": "cpu", "torch_dtype": "float64"}
    chat = framework.chat(saved, 1, kv_store=tmp_path / "kv", model_kwargs=options)
    assert len(loads) == 1
    step = framework.ingestion(llm=chat)
    framework.ask(chat, "whole")
    assert step.source.engine is chat.engine
    assert copy.deepcopy(chat).engine is chat.engine
    [(model, kwargs)] = loads
    assert (model, kwargs["device"]) == (saved, "cpu")
    assert str(chat.engine.model.dtype) == "torch.float64"
    assert isinstance(chat.engine.store, DirectoryStore)


def test_the_first_question_does_not_measure_the_model(
    framework: Framework, saved: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    framework.ingest(framework.ingestion(model=saved, kv_store=tmp_path / "kv"), TEXTS)
    chat = framework.chat(saved, 1, kv_store=tmp_path / "kv")  # simulates a restart
    refuse = Mock(side_effect=AssertionError("The question measured the model"))
    for name in ("relay_is_exact", "causal_is_exact"):
        monkeypatch.setattr(relay_attention, name, refuse)
    for name in ("fingerprint_of", "AnswerRules"):
        monkeypatch.setattr(block_model, name, refuse)
    monkeypatch.setattr(context_model, "profile_attention", refuse)
    question = "".join(map(wrap, TEXTS)) + "Which is deep?"
    reuse = framework.ask(chat, "whole", question).reuse
    assert reuse["reused_tokens"] > 0


def test_ingestion_loads_on_first_use(
    framework: Framework, saved: str, loads: list[Any], tmp_path: Path
) -> None:
    step = pickle.loads(pickle.dumps(framework.ingestion(model=saved, kv_store=tmp_path / "kv")))
    assert loads == []
    framework.ingest(step, TEXTS)
    assert len(loads) == 1


def test_named_models_survive_pickling(framework: Framework, saved: str, tmp_path: Path) -> None:
    options = {"mode": "full"}
    chat = framework.chat(saved, 3, kv_store=tmp_path / "kv", generate_kwargs=options)
    expected = framework.ask(chat, "whole").text
    data = pickle.dumps(chat)
    assert len(data) < 5000  # no weights
    sent = pickle.loads(data)
    assert framework.ask(sent, "whole").text == expected
    assert sent.generate_kwargs == options
    step = framework.ingestion(model=saved, kv_store=tmp_path / "kv")
    framework.ingest(pickle.loads(pickle.dumps(step)), TEXTS)
    stats = framework.ingest(step, TEXTS)
    assert (stats.computed, stats.reused) == (0, 2)


def test_live_objects_are_not_pickled(framework: Framework, saved: str) -> None:
    own_tokenizer = {"tokenizer": tiny_tokenizer()}
    for chat, found in (
        (framework.chat(tuned_engine()), r"live objects \(engine"),
        (framework.chat(saved, model_kwargs=own_tokenizer), r"live objects \(tokenizer"),
        (framework.chat(saved, kv_store=MemoryStore(1000)), r"live objects \(kv_store"),
    ):
        with pytest.raises(pickle.PicklingError, match=found):
            pickle.dumps(chat)


def test_exactly_one_model_source_is_required(framework: Framework) -> None:
    engine, ready = tuned_engine(), tiny_model()
    chat: Any = framework.chat(engine)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "Expected either engine= or a model.*found neither"),
        ({"model_name": "bundled", "engine": engine}, "found both"),
        ({"model_name": ready}, "without its tokenizer; pass model_kwargs="),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            type(chat)(**arguments)
    with pytest.raises(ValueError, match="only one of: llm="):
        framework.ingestion(model="bundled", llm=chat)
