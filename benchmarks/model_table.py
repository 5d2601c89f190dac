"""Write docs/models.md, a table of the models that support block mode.

    python benchmarks/model_table.py

For every causal language model family in the installed transformers, the script builds a tiny
random model, detects its layers, and compares block mode with the oracle. It includes new families
automatically, and fails if an accepted family is not exact. It takes about two minutes on one core.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.kinds import ProbeError, summary
from blockattn_rag.model.miniature import VOCABULARY, check_architecture, miniature
from blockattn_rag.model.multimodal import text_class
from blockattn_rag.model.probe import LOGITS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

_SECTIONS: dict[str, Any] = {
    "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
}
_HEADS: dict[str, Any] = {"head_dim": 16, "num_key_value_heads": 4}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_text": {"num_kv_shared_layers": 10},  # as in the models E2B and E4B
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": _HEADS,
    "nemotron": _HEADS,
    **dict.fromkeys(("glm4v", "glm46v", "qwen2_vl", "qwen2_5_vl"), _SECTIONS),
}
"""Settings for families whose default config is incomplete or lacks a layer type."""

CAUSES = {
    "with an indexer": "sparse attention with an indexer",
    "is chunked": "chunked attention",
    "not causal": "bidirectional attention",
    "(such as ALiBi)": "biases by distance, such as ALiBi",
    "by itself": "positions added to the embeddings",
    "values differ by 0;": "rotation of an unknown kind",
    "not plain rotary": "learned or sinusoidal positions",
    "no attention layer": "no keys and values: recurrent, or without a cache",
    "one entry for each token": "a cache with other tokens than the text",
    "no effect": "windows that apply to cached tokens only",
    "which is not supported": "a cache of its own",
}
"""Reasons in the table of refused families, by a substring of the error message."""


class Checkpoint(NamedTuple):
    """A published model: the layers that store keys and values, and their sizes.

    ``heads``: Number of key-value heads; 0 for latent attention. ``size``: Size of a head's keys and
    of its values; for latent attention, the total size of the latent and the rotary key.
    """

    name: str
    family: str
    layers: int
    heads: int
    size: int
    all_layers: int

    @property
    def bytes_per_token(self) -> int:
        """Size of a token in bytes, in a 16-bit type."""
        return 2 * self.layers * (2 * self.heads * self.size or self.size)


# Entered by hand from the published config.json files, and not verified against them: number of
# attention layers, num_key_value_heads, head_dim (or kv_lora_rank + qk_rope_head_dim), and
# num_hidden_layers.
CHECKPOINTS = [
    Checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 30, 3, 64, 30),
    Checkpoint("HuggingFaceTB/SmolLM3-3B", "smollm3", 36, 4, 128, 36),
    Checkpoint("meta-llama/Llama-3.2-1B-Instruct", "llama", 16, 8, 64, 16),
    Checkpoint("meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 8, 128, 32),
    Checkpoint("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 32, 8, 128, 32),
    Checkpoint("microsoft/phi-4", "phi3", 40, 10, 128, 40),
    Checkpoint("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 24, 2, 64, 24),
    Checkpoint("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 4, 128, 28),
    Checkpoint("Qwen/Qwen3-4B", "qwen3", 36, 8, 128, 36),
    Checkpoint("Qwen/Qwen3-8B", "qwen3", 36, 8, 128, 36),
    Checkpoint("Qwen/Qwen3-30B-A3B", "qwen3_moe", 48, 4, 128, 48),
    Checkpoint("zai-org/GLM-4-9B-0414", "glm4", 40, 2, 128, 40),
    Checkpoint("allenai/OLMo-2-1124-7B", "olmo2", 32, 32, 128, 32),
    Checkpoint("google/gemma-3-4b-it", "gemma3_text", 34, 4, 256, 34),
    Checkpoint("google/gemma-3-12b-it", "gemma3_text", 48, 8, 256, 48),
    Checkpoint("openai/gpt-oss-20b", "gpt_oss", 24, 8, 64, 24),
    Checkpoint("google/gemma-3n-E2B-it", "gemma3n_text", 20, 2, 256, 30),
    Checkpoint("google/gemma-3n-E4B-it", "gemma3n_text", 20, 2, 256, 35),
    Checkpoint("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", 27, 0, 576, 27),
    Checkpoint("deepseek-ai/DeepSeek-V3", "deepseek_v3", 61, 0, 576, 61),
    Checkpoint("openbmb/MiniCPM3-4B", "minicpm3", 62, 0, 288, 62),
    Checkpoint("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi_linear", 7, 0, 576, 27),
    Checkpoint("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 12, 2, 256, 48),
    Checkpoint("LiquidAI/LFM2-1.2B", "lfm2", 6, 8, 64, 16),
    Checkpoint("nvidia/Nemotron-H-8B-Base-8K", "nemotron_h", 4, 8, 128, 52),
    Checkpoint("ai21labs/Jamba-v0.1", "jamba", 4, 8, 128, 32),
    Checkpoint("ibm-ai-platform/Bamba-9B", "bamba", 3, 8, 128, 32),
]


class Row(NamedTuple):
    """Result for a family.

    ``how``: ``"relay"``, ``"copy"``, ``"latent"``, ``"hybrid"``, ``"refused"`` or ``"not built"``.
    ``detail``: The layer types of the tiny model, or the reason why it is refused. ``error``:
    Relative error of its logits. ``is_rotary``: Whether it has rotary or no position encoding.
    """

    family: str
    how: str
    detail: str
    error: float = 0.0
    is_rotary: bool = False

    @property
    def is_accepted(self) -> bool:
        return self.how not in ("refused", "not built")


def families() -> list[str]:
    """Return the causal language model families, without text models of multimodal families."""
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return sorted(name for name in names if f"{name}_text" not in names)


def measure(family: str) -> Row | None:
    """Build and check the tiny model of a family. Return None for encoder-decoder models."""
    try:
        config = AutoConfig.for_model(family, **SETTINGS.get(family, {}))
        text = config.get_text_config(decoder=True)
        model = None if config.is_encoder_decoder else miniature(config)
    except Exception as error:  # noqa: BLE001 -- the code of any family
        message = str(error).replace("\n", " ")
        return Row(family, "not built", f"{type(error).__name__}: {message}"[:90])
    if model is None:
        return None
    is_rotary = bool(getattr(text, "rope_parameters", None) or getattr(text, "rotary_dim", None))
    try:
        check_architecture(config)
        block_model = BlockModel(model, _tokenizer(), pack_weights=False)
        has_relay = block_model.supports_relay
    except ProbeError as error:
        return Row(family, "not built", f"{error.__cause__!r}"[:90])
    except UnsupportedModelError as error:
        causes = (cause for part, cause in CAUSES.items() if part in str(error))
        return Row(family, "refused", next(causes, str(error)), is_rotary=is_rotary)
    difference = _error(block_model, has_relay=has_relay)
    profile = block_model.profile
    how = "relay" if has_relay else "copy"
    if has_relay and any(kind.attention == "latent" for kind in profile.kinds):
        how = "latent"
    if profile.has_states:
        how = "hybrid"
    return Row(family, how, summary(profile.kinds), difference, is_rotary=True)


def measure_multimodal(family: str) -> tuple[str, str] | None:
    """Return the class name of a multimodal family's language model, and its layer types.

    The name is empty if the language model has no class. The result is None if the family is
    refused, is not a decoder, or has no tiny model."""
    try:
        config = AutoConfig.for_model(family, **SETTINGS.get(family, {}))
        profile = None if config.is_encoder_decoder else check_architecture(config)
    except Exception:  # noqa: BLE001 -- the code of any family
        return None
    if profile is None:
        return None
    kind = text_class(config.get_text_config(decoder=True))
    return (kind.__name__ if kind else ""), summary(profile.kinds)


def _error(model: BlockModel, *, has_relay: bool) -> float:
    """Return the largest error of block mode's logits.

    The cases cover both paths, two orders, with and without a sink, a block longer than the
    windows, and a block with a single token."""
    generator = torch.Generator().manual_seed(1)
    first, one, other, final = (
        torch.randint(5, VOCABULARY - 8, (n,), generator=generator).tolist()
        for n in (21, 1, 42, 12)
    )
    errors = []
    for sink, context in (((), [first, one, other]), (first[:4], [first, other, first, one])):
        expected = oracle_logits(model.hf_model, [*context, final], sink)[-1]
        placed = placed_context(model, context, sink)
        for assembly in get_args(Literal["copy", "relay"])[: 1 + has_relay]:
            cache = model.cache_for(placed, assembly=assembly)
            found = model.next_logits(torch.tensor([final]), cache).float()
            errors.append(relative_error(found, expected))
    return max(errors)


def _tokenizer() -> Any:
    words = {f"t{number}": number for number in range(VOCABULARY)}
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join((lines[0], "|" + "---|" * len(head), *lines[1:])) + "\n"


def share(rows: Sequence[Row]) -> tuple[int, int]:
    """Count the accepted families, and the families with rotary or no position encoding."""
    return sum(row.is_accepted for row in rows), sum(row.is_rotary for row in rows)


def page(rows: Sequence[Row], multimodal: Mapping[str, tuple[str, str]]) -> str:
    """Return the text of docs/models.md. ``multimodal``: ``measure_multimodal`` of each family."""
    accepted, of = share(rows)
    counts = Counter(row.how for row in rows)
    refused = [row for row in rows if row.how == "refused"]
    by_cause: dict[str, list[str]] = {}
    for row in refused:
        by_cause.setdefault(row.detail, []).append(f"`{row.family}`")
    checkpoints = sorted(CHECKPOINTS, key=lambda one: one.bytes_per_token)
    return _PAGE.format(
        version=transformers.__version__,
        accepted=accepted,
        of=of,
        share=100 * accepted / of,
        counts=", ".join(
            f"{counts[name]} {name}" for name in ("relay", "copy", "latent", "hybrid")
        ),
        families=table(
            ("family", "block mode", "layers of the tiny model"),
            ((f"`{row.family}`", row.how, row.detail) for row in rows if row.is_accepted),
        ),
        refused=table(
            ("cause", "families"),
            ((cause, ", ".join(names)) for cause, names in sorted(by_cause.items())),
        ),
        unknown=table(
            ("family", "why"),
            ((f"`{row.family}`", f"`{row.detail}`") for row in rows if row.how == "not built"),
        ),
        multimodal=table(
            ("family", "language model", "its layers"),
            (
                (f"`{family}`", f"`{kind}`" if kind else "not separate", layers)
                for family, (kind, layers) in multimodal.items()
            ),
        ),
        checkpoints=table(
            ("checkpoint", "family", "layers that store", "bytes per token"),
            (
                (
                    one.name,
                    f"`{one.family}`",
                    f"{one.layers} of {one.all_layers}",
                    f"{one.bytes_per_token:,}",
                )
                for one in checkpoints
            ),
        ),
    )


# ruff: noqa: E501 -- the page is wrapped like the other pages
_PAGE = """# Models

<!-- Written by benchmarks/model_table.py: change it there. -->

A model supports block mode if moving a block rotates its keys in a known way and changes nothing else. The package measures this when a model is
loaded, and for models from the hub before their weights are downloaded. `blockattn-rag check MODEL` shows a model's kinds of layers, its bytes per
token, and how exact block mode is.

| block mode | meaning |
|---|---|
| relay | attention reads stored blocks in place; see [positions](concepts.md#positions). A layer with a sliding window reads only the blocks within its window. Soft caps, attention sinks, and layers that share keys and values are supported |
| copy | blocks are rotated and joined for each request, because the model has its own attention code |
| latent | multi-head latent attention: the latent and its rotary key are stored, and only the rotary key is rotated. Attention reads latents without expanding them ([details](architecture.md#attention), [benchmark](benchmarks.md#kinds-of-layers)) |
| hybrid | some layers have a recurrent or convolution state: see [hybrid models](concepts.md#hybrid-models) |

`blockattn-rag serve` supports all of these except hybrid models, and latent models for which vLLM expands the latents to all heads (MiniCPM3). In
vLLM, plain attention, windows, attention sinks, layers that share keys and values, and latents were tested on a CPU.
[Compatibility](compatibility.md#layers-in-vllm) lists what is untested.

Some models scale queries by position, such as Ministral 3 beyond 16,384 tokens. Queries of the final block and of recomputed tokens are scaled by
their position in the prompt, and those of other passage tokens by their position in the passage.

## Families

We tested tiny random models of the causal language model families in transformers {version}. {accepted} of the {of} families with rotary or no position
encoding run in block mode ({share:.0f} %): {counts}. All are exact: the relative error of the logits is at most 10⁻⁴ in float32.

{families}
## Refused families

{refused}
Not measured, because no tiny model could be built from the default config:

{unknown}
## Multimodal checkpoints

Multimodal checkpoints process only text. If a forward pass at load time shows that the language model computes the same logits as the multimodal
model, only the language model is loaded. Otherwise, or if the language model has no separate class, the complete multimodal model stays in memory.
Messages with images are rejected. The table was measured on tiny language models with default configs. Other families may work; they are measured
when they are loaded.

{multimodal}
## Checkpoints

This table shows the bytes of keys and values (or latents) per token in 16 bits. The number of layers that store them, the heads and their sizes were
copied by hand from each checkpoint's published `config.json`, and are not verified by a test. States are not stored with passages, so they take no
space.

{checkpoints}"""


def rows() -> Iterator[Row]:
    """Yield the rows of all families."""
    for family in families():
        row = measure(family)
        gc.collect()
        if row is not None:
            yield row


def main() -> None:
    warnings.simplefilter("ignore")
    quiet: Any = transformers.logging.set_verbosity_error
    quiet()
    logging.disable(logging.WARNING)
    found = [*rows()]
    wrong = [row for row in found if row.is_accepted and not row.error <= LOGITS[torch.float32]]
    if wrong:
        raise SystemExit(f"Not exact: {wrong}")
    accepted, of = share(found)
    multimodal = {
        family: row
        for family in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        if (row := measure_multimodal(family)) is not None
    }
    PAGE.write_text(page(found, multimodal), encoding="utf-8")
    print(f"{accepted} of {of} families with rotary or no positions run in block mode, all exact")


if __name__ == "__main__":
    main()
