"""Measure time to first token, time per token and memory, and compare with the device's limits.

The models are Llama shapes with random weights in bfloat16. The question has 50 tokens, and keys
and values are on the device. There are four paths: ``full`` prefills everything, ``copy``
concatenates blocks and re-encodes their positions, ``relay`` attends to blocks in place, and
``floor`` computes only the question. These cases are measured for each shape and context:

* ``request``: the engine's time to first token in wall-clock time, including tokenization.
* ``recompute``: the time to first token with a tenth of the tokens recomputed for the question (the
  larger shape, up to 32,768 tokens), compared with full mode and block mode.
* ``forward``: placing the blocks and the forward pass of the question, timed with CUDA events.
* ``decode``: the time per token after the first.
* ``memory``: the peak memory that a request allocates.

The limit of a time is the larger of two quotients: bytes read and written divided by the device's
bandwidth, and operations divided by its compute rate (``harness.Ceilings``, measured in the same
process). The bytes are those of weights, keys and values. Relay reads each once; copy reads, writes
and rereads keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from efficiency import measure_decode, measure_memory, measure_ttft
from harness import Campaign, Case, Ceilings, Record, elapsed_s, random_ids
from measuring import in_turns
from random_models import random_prompt
from torch import Tensor

from blockattn_rag import Recipe
from blockattn_rag.check.model import placed_context
from blockattn_rag.kv.context import Context
from blockattn_rag.lab.planning import prefill_flops
from blockattn_rag.model import BlockModel

SHAPES: Sequence[str] = ("8b", "1b")
LENGTHS: Sequence[int] = (32_768, 4_096, 131_072)
BLOCK_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 512, 50, 32
OTHER_BLOCKS: Sequence[int] = (128, 2_048, 8_192)
"""Additional block sizes, measured at the first length. Relay concatenates blocks below a size that
is a constant in ``blockattn_rag.attention``; these results show whether the constant is optimal."""

TRAFFIC: Mapping[str, int] = {"full": 0, "copy": 3, "relay": 1, "floor": 0}
"""How often each path reads or writes the keys and values of the context."""

RECOMPUTE = 0.1
"""Share of the tokens that are recomputed in the ``recompute`` case."""

PATHS = ("full", "copy", "relay")
REUSING = ("copy", "relay")


def cases(campaign: Campaign) -> Iterator[Case]:
    """Yield the cases of the step, in order of importance."""
    shapes, lengths, others = SHAPES, LENGTHS, OTHER_BLOCKS
    if campaign.dry:
        shapes, lengths, others = ("tiny",), (64,), (16,)
    # Measure the longest contexts last, because they take the most time.
    *_, longest = LENGTHS
    order = sorted(itertools.product(shapes, lengths), key=lambda one: one[1] == longest)
    for shape, length in order:
        model = partial(campaign.model, shape, max(LENGTHS) + 1024)
        block = min(BLOCK_TOKENS, length // 2)
        runs: dict[str, Callable[[BlockModel], Record]] = {
            "forward": partial(forward, campaign, length=length, block=block),
            "request": partial(request, campaign, length=length, block=block),
            "recompute": partial(recomputed, campaign, length=length, block=block),
            "decode": partial(decode, campaign, length=length, block=block),
            "memory": partial(memory, campaign, length=length, block=block),
            # The other paths may fit in memory even if a full prefill does not.
            "forward, reuse": partial(forward, campaign, length=length, block=block, paths=REUSING),
        }
        if length != max(lengths):
            del runs["forward, reuse"]
        if shape != shapes[0] or length == longest:
            del runs["recompute"]
        if length == lengths[0]:
            for other in others:
                runs[f"forward, blocks of {other}"] = partial(
                    forward, campaign, length=length, block=other, paths=REUSING
                )
        for name, run in runs.items():
            yield Case(f"{shape}/{length}/{name}", partial(_on_model, run, model))


def _on_model(run: Callable[[BlockModel], Record], model: Callable[[], BlockModel]) -> Record:
    return run(model())  # Create the prompt only when the case runs, not when cases are listed.


def request(campaign: Campaign, model: BlockModel, *, length: int, block: int) -> Record:
    """Measure the case ``request``: ``<path>_s`` for each path, and ``relay_over_copy``."""
    engine = campaign.engine(model)
    (row,) = measure_ttft(
        engine,
        [length],
        block_tokens=block,
        question_tokens=QUESTION_TOKENS,
        repeats=repeats(campaign, length),
    )
    return row | {"block_tokens": block, "relay_over_copy": row["relay_s"] / row["copy_s"]}


def recomputed(campaign: Campaign, model: BlockModel, *, length: int, block: int) -> Record:
    """Measure the case ``recompute``: ``<way>_s`` for full mode, block mode and recomputation, and
    ``full_over_recompute``."""
    engine = campaign.engine(model)
    prompt = random_prompt(length, block, QUESTION_TOKENS, model.config.vocab_size)
    engine.generate(prompt, max_new_tokens=1)  # Store the blocks.

    def ttft_s(**options: Any) -> float:
        answer = engine.generate(prompt, max_new_tokens=1, do_sample=False, **options)
        return answer.stats.ttft_s

    ways: dict[str, Callable[[], float]] = {
        "full": partial(ttft_s, mode="full"),
        "block": ttft_s,
        "recompute": partial(ttft_s, recipe=Recipe(recompute=RECOMPUTE)),
    }
    row = in_turns(ways, repeats(campaign, length))
    row |= {"length": length, "block_tokens": block}
    return row | {"full_over_recompute": row["full_s"] / row["recompute_s"]}


def forward(
    campaign: Campaign,
    model: BlockModel,
    *,
    length: int,
    block: int,
    paths: Sequence[str] = PATHS,
) -> Record:
    """Measure the case ``forward``: ``<path>_s`` and ``<path>_limit_s``."""
    prompt = Prompt.drawn(model, length, block)
    ways = {
        path: partial(elapsed_s, partial(prompt.answer, model, path), model.device)
        for path in (*paths, "floor")
    }
    row: Record = in_turns(ways, repeats(campaign, length))
    row |= {"length": length, "block_tokens": block, "ceilings": campaign.ceilings._asdict()}
    for path in ways:
        row[f"{path}_limit_s"] = limit_s(model, campaign.ceilings, path, length)
    return row | {"relay_over_copy": row["relay_s"] / row["copy_s"]}


def repeats(campaign: Campaign, length: int) -> int:
    """Return the number of runs, which is lower for the longest context to save time."""
    return min(campaign.repeats, 2) if length == max(LENGTHS) else campaign.repeats


class Prompt(NamedTuple):
    """A prompt of random tokens.

    Args:
        context: The prompt's blocks, encoded and placed at their positions.
        question: Token ids of the final block, ``[1, n]``.
        everything: Token ids of the complete prompt, ``[1, n]``.
    """

    context: Context
    question: Tensor
    everything: Tensor

    @classmethod
    def drawn(cls, model: BlockModel, length: int, block: int) -> Prompt:
        sizes = [min(block, length - start) for start in range(0, length, block)]
        *blocks, question = random_ids([*sizes, QUESTION_TOKENS], model.config.vocab_size)
        everything = [*(token for ids in blocks for token in ids), *question]
        return cls(
            placed_context(model, blocks), torch.tensor([question]), torch.tensor([everything])
        )

    def answer(self, model: BlockModel, path: str) -> Tensor:
        """Return the logits after the prompt, computed on a path."""
        if path == "full":
            return model.next_logits(self.everything)
        if path == "floor":
            return model.next_logits(self.question, model.cache_for(Context(()), assembly="relay"))
        assembly: Any = path
        return model.next_logits(self.question, model.cache_for(self.context, assembly=assembly))


def decode(campaign: Campaign, model: BlockModel, *, length: int, block: int) -> Record:
    """Measure the case ``decode``: ``<path>_s``, ``<path>_tokens_per_s``, and ``limit_s``."""
    (row,) = measure_decode(
        campaign.engine(model),
        [length],
        block_tokens=(block,),
        question_tokens=QUESTION_TOKENS,
        new_tokens=4 if campaign.dry else NEW_TOKENS,
        repeats=min(campaign.repeats, 2),
    )
    for path in PATHS:
        row[f"{path}_tokens_per_s"] = 1 / row[f"{path}_s"]
    moved = weight_bytes(model) + length * model.bytes_per_token
    return row | {"limit_s": moved / campaign.ceilings.bytes_per_s}


def memory(campaign: Campaign, model: BlockModel, *, length: int, block: int) -> Record:
    """Measure the case ``memory``: ``<path>_peak_bytes``, ``stored_bytes`` and ``weight_bytes``."""
    (row,) = measure_memory(
        campaign.engine(model), [length], block_tokens=block, question_tokens=QUESTION_TOKENS
    )
    return row | {"block_tokens": block, "weight_bytes": weight_bytes(model)}


def limit_s(
    model: BlockModel,
    ceilings: Ceilings,
    path: str,
    length: int,
    question_tokens: int = QUESTION_TOKENS,
) -> float:
    """Return a lower bound of the time to first token in seconds."""
    sizes = weight_bytes(model), model.bytes_per_token
    return path_limit_s(model.config, *sizes, ceilings, path, length, question_tokens)


def path_limit_s(
    config: Any,
    weight_bytes: int,
    token_bytes: int,
    ceilings: Ceilings,
    path: str,
    length: int,
    question_tokens: int = QUESTION_TOKENS,
) -> float:
    """Return ``limit_s`` for a model's config, the size of its weights, and its bytes of keys and
    values per token."""
    moved = weight_bytes + TRAFFIC[path] * length * token_bytes
    new, cached = question_tokens, length if path in REUSING else 0
    new += length if path == "full" else 0
    flops = prefill_flops(config, new, cached)
    return max(moved / ceilings.bytes_per_s, flops / ceilings.flops_per_s)


def weight_bytes(model: BlockModel) -> int:
    """Return the bytes of weights that every forward pass reads: all but the input embeddings."""
    table: Tensor = model.hf_model.get_input_embeddings().weight
    total: int = sum(one.nbytes for one in model.hf_model.parameters())
    return total - table.nbytes
