"""Multimodal checkpoints used for text: the class that is loaded, and exactness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedModel

from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_generate, oracle_logits
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.loading import load_model
from blockattn_rag.model.miniature import VOCABULARY, shrunk
from blockattn_rag.model.multimodal import language_model
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.server.profile import profile_of
from tests.models import save_model

_VISION = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size"), 32),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_heads", "num_attention_heads"), 2),
    "image_size": 28,
    "patch_size": 14,
    "mlp_ratio": 1,
    "out_hidden_size": 64,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
# Model type, settings of the text config, and the class that is loaded.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3": ("gemma3", {}, "Gemma3ForCausalLM"),
    "gemma4": ("gemma4", {}, "Gemma4ForCausalLM"),
    "ministral3": ("mistral3", {"model_type": "ministral3"}, "Ministral3ForCausalLM"),
    "mistral_small4": ("mistral3", {"model_type": "mistral4"}, "Mistral4ForCausalLM"),
    "qwen2_5_vl": ("qwen2_5_vl", _MROPE, "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", {}, "Qwen3VLForConditionalGeneration"),
    "qwen3_5": ("qwen3_5", {}, "Qwen3_5ForCausalLM"),
    "lfm2_vl": ("lfm2_vl", {}, "Lfm2ForCausalLM"),
    "kimi_k25": ("kimi_k25", {}, "DeepseekV3ForCausalLM"),
    "internvl": ("internvl", {}, "Qwen2ForCausalLM"),
    # The language model on its own would scale its logits.
    "aya_vision": ("aya_vision", {}, "AyaVisionForConditionalGeneration"),
}


def multimodal(name: str) -> PreTrainedModel:
    """Return a tiny random multimodal model of the class that is named in checkpoints."""
    family, settings, _ = FAMILIES[name]
    config = AutoConfig.for_model(family, **({"text_config": settings} if settings else {}))
    fields = {
        key: min(value, VOCABULARY - 1) if key.endswith(("token_id", "token_index")) else value
        for key, value in config.to_dict().items()
    }
    for key, part in fields.items():
        if isinstance(part, dict):
            fields[key] = {one: _VISION.get(one, value) for one, value in part.items()}
    text: Any = config.get_text_config(decoder=True)
    fields["text_config"] = {**shrunk(text), "eos_token_id": 257, "pad_token_id": 258}
    small = type(config).from_dict(fields)
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(small)]
    torch.manual_seed(0)
    model: PreTrainedModel = kind(small).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_text_answers_are_those_of_the_multimodal_model(name: str, tmp_path: Path) -> None:
    original: Any = multimodal(name)
    save_model(original, tmp_path)
    engine = BlockAttentionEngine.from_pretrained(tmp_path, device="cpu")
    model = engine.model
    assert type(model.hf_model).__name__ == FAMILIES[name][2]

    blocks = [[*range(5, 26)], [30], [*range(40, 60)], [*range(70, 80)]]
    ids = torch.tensor([[token for block in blocks for token in block]])
    with torch.inference_mode():
        expected = original(input_ids=ids).logits[0, -1]
    assert relative_error(model.next_logits(ids), expected) < LOGITS[torch.float32]

    placed = placed_context(model, blocks[:-1])
    found = model.next_logits(torch.tensor([blocks[-1]]), model.cache_for(placed))
    assert relative_error(found, oracle_logits(original, blocks)[-1]) < LOGITS[torch.float32]
    answer = model.generate(
        placed.token_ids, blocks[-1], Sampling(max_new_tokens=8), cache=model.cache_for(placed)
    )
    assert answer == oracle_generate(original, blocks, 8, sorted(model.end_token_ids))
    prompt = ["The first passage.", "A second one.", "The question?"]
    first, second = (engine.generate(prompt, max_new_tokens=4) for _ in range(2))
    # Hybrid models promote the last passage, that is, compute it with the question.
    assert second.stats.hits == (1 if model.profile.has_states else 2)
    assert second.token_ids == first.token_ids


def test_loading_only_the_language_model_drops_the_image_encoder(tmp_path: Path) -> None:
    original: Any = multimodal("gemma3")
    alone: Any = language_model(original)
    names = [name for name, _ in alone.named_parameters()]
    assert any("vision" in name for name, _ in original.named_parameters())
    assert not any("vision" in name or "projector" in name for name in names)
    assert alone.model is original.get_decoder()
    assert alone.generation_config is original.generation_config
    assert language_model(alone) is alone
    alone.save_pretrained(tmp_path)
    assert type(load_model(tmp_path, device="cpu")) is type(alone)


def test_the_fine_tuning_mark_is_kept(tmp_path: Path) -> None:
    original = multimodal("gemma3")
    original.config.block_attention = {"version": 1}
    save_model(original, tmp_path)
    assert BlockModel.from_pretrained(tmp_path, device="cpu").is_block_tuned


@pytest.mark.parametrize("name", ["gemma3", "ministral3", "qwen2_5_vl"])
def test_checkpoint_and_loaded_model_have_the_same_profile(name: str, tmp_path: Path) -> None:
    save_model(multimodal(name), tmp_path)
    model = BlockModel.from_pretrained(tmp_path, device="cpu", dtype="float32")
    assert profile_of(CheckpointModel(tmp_path, torch.float32)) == profile_of(model)
