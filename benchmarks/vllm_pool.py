"""Calculate a request's memory in vLLM's page pool, with and without the hybrid KV cache manager.

    .venv-vllm/bin/python benchmarks/vllm_pool.py

The script uses vLLM's own functions, loads no model, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

POOL_GIB = 64


class Shape(NamedTuple):
    """Layers of a published model: the number of layers per window size, and their heads."""

    name: str
    windowed: int
    full: int
    window: int
    kv_heads: int
    head_size: int


# Entered by hand from the published config.json files, as in model_table.py.
SHAPES = (
    Shape("google/gemma-3-12b-it", 40, 8, 1024, 8, 256),
    Shape("openai/gpt-oss-20b", 12, 12, 128, 8, 64),
)


def specs_of(shape: Shape) -> dict[str, Any]:
    """Return the KV cache specs of all layers, with full layers evenly spaced among the others."""
    sizes: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "dtype": torch.bfloat16,
    }
    every = (shape.windowed + shape.full) // shape.full
    return {
        f"layers.{layer}": FullAttentionSpec(**sizes)
        if layer % every == every - 1
        else SlidingWindowSpec(**sizes, sliding_window=shape.window)
        for layer in range(shape.windowed + shape.full)
    }


def engine_config(folder: Path, tokens: int, batch: int, *, hybrid: bool) -> VllmConfig:
    engine = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=16,
        max_model_len=tokens,
        max_num_batched_tokens=batch,
        disable_hybrid_kv_cache_manager=not hybrid,
    ).create_engine_config()
    # The value for a CPU. It does not affect the sizes.
    engine.cache_config.kv_cache_layout = "LBHNC"
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="Tokens per request")
    parser.add_argument("--batch", type=int, default=2_048, help="Tokens per step")
    options = parser.parse_args()
    print("| model | without | with | requests |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        config = AutoConfig.for_model("llama", max_position_embeddings=options.tokens)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(name)
        for shape in SHAPES:
            requests = []
            for hybrid in (False, True):
                engine = engine_config(Path(name), options.tokens, options.batch, hybrid=hybrid)
                memory = [POOL_GIB << 30]
                (cache,) = get_kv_cache_configs(engine, [specs_of(shape)], memory)
                requests.append(get_kv_cache_capacity(engine, cache)[1])
            without, with_it = (f"{1024 * POOL_GIB / count:,.0f} MiB" for count in requests)
            times = requests[1] / requests[0]
            print(f"| {shape.name} | {without} | {with_it} | {times:.1f} times as many |")


if __name__ == "__main__":
    main()
