"""How fast blocks are encoded, against a plain batched forward of the same tokens.

    python benchmarks/encode_throughput.py [--blocks 64] [--repeats 3]

Prints tokens per second of both and their ratio; at least 0.9 is wanted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from blockattn_rag.model import BlockModel, EncodeRequest

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def median_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def any_tokenizer() -> Any:
    """Token ids are drawn here, but a model does not come without a tokenizer."""
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of an average block")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    hf_model = auto.from_config(AutoConfig.for_model("llama", **SHAPE))
    model = BlockModel(hf_model, any_tokenizer())
    draw = random.Random(0)
    lengths = [
        draw.randint(arguments.tokens // 2, arguments.tokens * 3 // 2)
        for _ in range(arguments.blocks)
    ]
    requests = [
        EncodeRequest([draw.randrange(SHAPE["vocab_size"]) for _ in range(n)], str(i), "")
        for i, n in enumerate(lengths)
    ]
    total = sum(lengths)
    width = arguments.tokens
    flat = [token for request in requests for token in request.token_ids]
    plain = torch.tensor(flat[: len(flat) // width * width]).reshape(-1, width)

    @torch.inference_mode()
    def forward() -> None:
        for rows in torch.split(plain, max(1, 2048 // width)):
            model.hf_model(
                input_ids=rows, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1
            )

    def encode() -> None:
        for _ in model.encode(requests):
            pass

    encode()  # once unmeasured, so that both find the same warm machine
    plain_rate = plain.numel() / median_s(forward, arguments.repeats)
    block_rate = total / median_s(encode, arguments.repeats)
    print(f"plain forward {plain_rate:8.0f} tokens/s")
    print(f"encode        {block_rate:8.0f} tokens/s")
    print(f"ratio         {block_rate / plain_rate:8.2f}")


if __name__ == "__main__":
    main()
