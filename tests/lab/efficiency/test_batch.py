from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.lab.efficiency import measure_batch, measure_shared
from blockattn_rag.lab.efficiency.batch import _HostStore, _sharing
from blockattn_rag.model.repetition import TEXT_TOKENS
from tests.lab.efficiency.engines import repeating_engine, tiny_engine


def test_every_batch_size_has_a_row_with_all_paths() -> None:
    rows = measure_batch(
        tiny_engine(), [1, 3], length=32, block_tokens=16, question_tokens=4, repeats=1
    )
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert all(row[f"{path}_s"] > 0 for path in ("full", "copy", "relay"))
        assert row["full_over_relay"] == row["full_s"] / row["relay_s"]


def test_blocks_can_be_measured_from_the_hosts_memory_too() -> None:
    sizes: dict[str, Any] = {"length": 32, "block_tokens": 16, "question_tokens": 4}
    (row,) = measure_batch(tiny_engine(), [2], **sizes, from_host=True, repeats=1)
    for path in ("copy_from_host", "relay_from_host"):
        assert row[f"full_over_{path}"] == row["full_s"] / row[f"{path}_s"]
    assert "full_from_host_s" not in row
    (row,) = measure_batch(tiny_engine(), [2], **sizes, repeats=1)  # the model is on the CPU
    assert "relay_from_host_s" not in row


def test_the_hosts_store_holds_what_was_computed_elsewhere_on_the_cpu() -> None:
    kv = Mock(spec=BlockKV, nbytes=1)
    with (
        patch("blockattn_rag.store.memory.check_key_of"),
        patch("blockattn_rag.store.memory.check_storable"),
    ):
        store = _HostStore(1 << 20)
        kv.to.return_value.nbytes = 1
        store.put("key", kv)
    kv.to.assert_called_once_with(torch.device("cpu"))
    assert store.get("key") is kv.to.return_value


def test_requests_share_the_system_block_and_nothing_else() -> None:
    prompts = _sharing(tiny_engine(), 3, system=20, context=8, question=4)
    assert len({prompt.context[0] for prompt in prompts}) == 1
    assert len({prompt.context[1] for prompt in prompts}) == 3
    assert [len(block.text.split()) for block in prompts[0].context] == [20, 8]


def test_shared_rows_hold_rates_gains_and_the_bound() -> None:
    rows = measure_shared(
        tiny_engine(),
        [1, 4],
        system_tokens=[32],
        context_tokens=8,
        question_tokens=4,
        new_tokens=3,
        repeats=1,
    )
    assert [(row["system_tokens"], row["batch"]) for row in rows] == [(32, 1), (32, 4)]
    for row in rows:
        assert row["gain"] == row["shared_tokens_per_s"] / row["unshared_tokens_per_s"]
        assert row["decode_gain"] > 0
    # 4 requests of 32 + 8 tokens: 160 read apart, 32 + 4 * 8 = 64 together.
    assert [row["bytes_ratio"] for row in rows] == [1.0, 2.5]


def test_a_model_that_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    monkeypatch.setattr(type(engine.model), "supports_relay", False)
    with pytest.raises(ValueError, match="does not share blocks"):
        measure_shared(engine, [2])


@pytest.mark.parametrize("options", [{"batch_sizes": [0]}, {"batch_sizes": [1], "length": 0}])
def test_sizes_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure_batch(tiny_engine(), **options)


def test_an_engine_that_answers_one_by_one_is_refused() -> None:
    engine = tiny_engine()
    engine.model.hf_model.generation_config.repetition_penalty = 1.05
    for measure in (measure_batch, measure_shared):
        with pytest.raises(ValueError, match="is not answered in batches"):
            measure(engine, [2])


def test_answers_that_end_early_are_an_error() -> None:
    engine = tiny_engine()
    engine.model.hf_model.generation_config.eos_token_id = list(range(512))
    with pytest.raises(ValueError, match="ended after 1 of 4 tokens"):
        measure_shared(engine, [2], system_tokens=[16], context_tokens=8, new_tokens=4, repeats=1)


def test_answers_that_repeat_themselves_are_measured_in_full() -> None:
    sizes: dict[str, Any] = {"system_tokens": [16], "context_tokens": 8, "question_tokens": 4}
    new_tokens = TEXT_TOKENS + 2
    (row,) = measure_shared(repeating_engine(), [2], **sizes, new_tokens=new_tokens, repeats=1)
    assert row["gain"] > 0
