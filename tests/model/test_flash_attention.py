"""Models that are loaded with ``attn_implementation="flash_attention_2"``."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as utils

from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.model.recompute import recompute
from blockattn_rag.model.sampling import Sampling
from tests.attention.cuda_stand_ins import flash_attn_2
from tests.model.miniatures import ASSEMBLIES, answers, logits_after
from tests.model.test_relay_attention import BLOCKS, FINAL_IDS
from tests.models import tiny_model, tiny_tokenizer

EXACT = LOGITS[torch.bfloat16]
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 6}}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor:
    """Stand-in for ``flash_attn.flash_attn_varlen_func``. States are ``[tokens, heads, D]``."""
    outputs = []
    rows = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for queries, keys in rows:
        parts = q[None, slice(*queries)], k[None, slice(*keys)], v[None, slice(*keys)]
        output, *_ = flash_attn_2(
            *parts, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        )
        outputs.append(output)
    return torch.cat(outputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Install a flash-attn stand-in for CPUs. Records the number of queries of each call."""
    counts: list[int] = []

    def flash_attn_func(q: Tensor, *rest: Any, **options: Any) -> Any:
        counts.append(q.shape[1])
        return flash_attn_2(q, *rest, **options)

    package: Any = ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    package.flash_attn_varlen_func = flash_attn_varlen_func
    package.flash_attn_with_kvcache = None
    padding: Any = ModuleType("flash_attn.bert_padding")
    padding.pad_input, padding.unpad_input = utils._pad_input, utils._unpad_input
    for module in (package, padding):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # transformers checks for the distribution and for a GPU.
    versions = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    monkeypatch.setitem(versions[2], "general_availability_check", lambda: True)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    for name in ("loaded_implementation", "flash_fn", "flash_varlen_fn", "process_flash_kwargs_fn"):
        monkeypatch.setattr(utils, f"_{name}", None)
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_model_with_flash_attention_are_exact(
    family: str, calls: list[int], tmp_path: Path
) -> None:
    exact: Any = tiny_model(family, **FAMILIES[family])
    exact.to(torch.bfloat16).save_pretrained(tmp_path)
    exact.float()
    model = BlockModel.from_pretrained(
        str(tmp_path),
        tokenizer=tiny_tokenizer(),
        device="cpu",
        dtype=torch.bfloat16,
        attn_implementation="flash_attention_2",
    )
    assert model.supports_relay
    context = placed_context(model, BLOCKS)
    assert calls
    expected = oracle_logits(exact, [*BLOCKS, FINAL_IDS])[-1]
    for assembly in ASSEMBLIES:
        calls.clear()
        found = logits_after(model, context, FINAL_IDS, assembly).float()
        assert relative_error(found, expected) <= EXACT
        assert bool(calls) == (assembly == "copy")
    found = oracle_logits(model.hf_model, [*BLOCKS, FINAL_IDS])[-1]
    assert relative_error(found, expected) <= EXACT
    changed, _ = recompute(model, context, [False, True, True, True], FINAL_IDS, 1.0)
    full = oracle_logits(exact, [[token for block in BLOCKS for token in block], FINAL_IDS])[-1]
    found = logits_after(model, changed, FINAL_IDS).float()
    assert relative_error(found, full) <= EXACT


@pytest.mark.usefixtures("calls")
def test_flash_attention_batches_equal_single_requests() -> None:
    hf_model: Any = tiny_model("llama")
    hf_model.to(torch.bfloat16).set_attn_implementation("flash_attention_2")
    model = BlockModel(hf_model, tiny_tokenizer(), pack_weights=False)
    contexts = [placed_context(model, BLOCKS), placed_context(model, BLOCKS[:2])]
    options = Sampling(max_new_tokens=5)
    prompts = [(context.token_ids, FINAL_IDS) for context in contexts]
    caches = [model.cache_for(*contexts, assembly=assembly) for assembly in ASSEMBLIES]
    found = [model.generate_batch(prompts, options, cache=cache) for cache in caches]
    single = [answers(model, context, FINAL_IDS, options) for context in contexts]
    assert found == [list(one) for one in zip(*single, strict=True)]
