"""Compare block mode on this device with a float64 oracle, for small random models.

The first cases compare the rotation of keys on this device with float64. Every other case is a
model: either a combination of head size, ratio of query heads to key-value heads, and dtype, or a
miniature model with sliding windows, soft caps, attention sinks, shared, latent or state layers.
Contexts have blocks of 1 to 8,192 tokens. The oracle is a dense forward pass with the block mask
and the same weights in float64. The tolerance of a path is four times the rounding error of this
forward pass in the model's dtype, but at least 1e-4. Errors are relative to the largest logit.

For recomputation, the oracle's forward pass contains the recomputed tokens again, after the
context. The oracle uses the tokens that the model selected, because rounding can change the
selection. Miniatures recompute all tokens, which gives the logits of full attention.

Answers are compared token by token, because rounding can decide near ties. The score of a greedy
token may be lower than the oracle's best score by up to twice the tolerance of the logits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import Campaign, Case, Record, random_ids
from random_models import counting_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import RecipeOracle, block_mask
from blockattn_rag.kv.rope import Pairing, RotaryLayout, relative_error, rotate, rotate_into
from blockattn_rag.lab.planning import floating_type
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection
from blockattn_rag.model.miniature import VOCABULARY as MINIATURE_VOCABULARY
from blockattn_rag.model.miniature import miniature
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.model.recompute import can_recompute, recompute
from blockattn_rag.prompts.blocks import Block, BlockPrompt

HEADS, VOCABULARY, FINAL_TOKENS, NEW_TOKENS = 8, 512, 12, 3
KINDS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "windows": ("gemma3_text", {}, ("bfloat16", "float32")),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 0.1}, ("bfloat16", "float32")),
    "shared layers": ("gemma3n_text", {}, ("bfloat16", "float32")),
    "states": ("qwen3_5_text", {}, ("bfloat16", "float32")),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, ("float32",)),
    # Rounding to 16 bits could change which experts process a token.
    "sinks": ("gpt_oss", {}, ("float32",)),
    "latent": ("deepseek_v3", {}, ("float32",)),
}
"""Miniature models by kind: family, config values and dtypes."""

ROTATIONS: Sequence[tuple[int, int]] = ((64, 64), (128, 128), (96, 48))
"""Head sizes, and the number of rotated dimensions."""

ROTATED_TOKENS = (16, 17, 4096)

INT8_ERROR = 0.05
"""Additional tolerance of the logits for keys and values in 8 bits, as a relative error."""

ROUNDING = 4
"""Tolerance of a path, in multiples of the dense forward pass's error in the same dtype."""

PATHS: Mapping[str, Mapping[str, Any]] = {
    "relay": {"assembly": "relay"},
    "copy": {"assembly": "copy"},
    "int8": {"assembly": "relay", "kv_dtype": "int8"},
}
"""Engine options, by path name."""

GREEDY: Mapping[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


class Sizes(NamedTuple):
    """Sizes of the cases: one model per head size, ratio and dtype, and one prompt per context."""

    head_sizes: Sequence[int] = (128, 64, 80, 96, 256)  # the sizes in SHAPES first
    ratios: Sequence[int] = (4, 1, 8, 2)  # LARGE_RATIO first, in case time runs out
    dtypes: Sequence[str] = ("bfloat16", "float32", "float16")
    contexts: Mapping[str, Sequence[int]] = {
        "tiny": (1, 1, 2, 3, 7, 1),
        "mixed": (16, 1, 64, 130, 511, 513),
        "large": (8192, 1024, 1),
    }
    recomputed: Sequence[tuple[int, int]] = ((128, 4), (64, 8))
    """Head sizes and ratios of the models that recompute tokens. The last one has one key head."""

    turns: Sequence[int] = (1, 16, 33, 70, 300, 512, 600, 1, 500, 600, 1)
    """Numbers of tokens in consecutive forward passes with one cache: every captured length, and
    more than the space for new tokens."""


DRY = Sizes((16,), (4,), ("bfloat16", "float32"), {"mixed": (16, 1, 7)}, ((16, 8),), (3, 1, 5))
SHARES = (0.1, 0.5, 1.0)
"""Shares of the tokens to recompute."""

LARGE, LARGE_RATIO = "large", 4
"""Context that is measured with one ratio and without recipes, because its oracle is slow."""


def cases(campaign: Campaign) -> Iterator[Case]:
    """Yield the cases of the step, in order of importance."""
    sizes = DRY if campaign.dry else Sizes()
    mixed = sizes.contexts["mixed"]
    runs: dict[str, Callable[[], Iterator[Record]]] = {}
    pairings: Sequence[Pairing] = ("half", "interleaved")
    for pairing, dtype in itertools.product(pairings, sizes.dtypes):
        runs[f"rotation, {pairing}, {dtype}"] = partial(rotations, campaign, pairing, dtype)
    for (size, ratio), dtype in itertools.product(sizes.recomputed, sizes.dtypes):
        name = f"head {size}, ratio {ratio}, {dtype}"
        runs[f"turns, {name}"] = partial(in_turns, campaign, size, ratio, dtype, sizes)
        runs[f"recompute, {name}"] = partial(recomputed, campaign, size, ratio, dtype, mixed)
    for kind, (_, _, dtypes) in KINDS.items():
        for dtype in dtypes:
            runs[f"{kind}, {dtype}"] = partial(of_kind, campaign, kind, dtype, mixed)
    for ratio, size, dtype in itertools.product(sizes.ratios, sizes.head_sizes, sizes.dtypes):
        chosen = {
            name: lengths
            for name, lengths in sizes.contexts.items()
            if name != LARGE or ratio == LARGE_RATIO
        }
        name = f"head {size}, ratio {ratio}, {dtype}"
        runs[name] = partial(compare, campaign, size, ratio, dtype, chosen)
    for name, run in runs.items():
        yield Case(name, partial(_judged, run))


def _judged(compared: Callable[[], Iterator[Record]]) -> Record:
    rows = list(compared())
    return {"passed": all(row["error"] <= row["budget"] for row in rows), "rows": rows}


def rotations(campaign: Campaign, pairing: Pairing, dtype: str) -> Iterator[Record]:
    """Yield the error of ``rotate_into`` on this device for each shape and dtype of the keys."""
    kind, device = floating_type(dtype), campaign.device
    generator = torch.Generator().manual_seed(0)
    for (size, rotary), tokens in itertools.product(ROTATIONS, ROTATED_TOKENS):
        layout = RotaryLayout(1 / torch.arange(1.0, rotary / 2 + 1), pairing)
        cos, sin = layout.cos_sin(7 * torch.arange(tokens), device)
        drawn = torch.randn(3, tokens, size, generator=generator)
        for states in {kind, torch.float32}:  # Keys of int8 blocks are dequantized to float32.
            keys = drawn.to(device, states)
            out = torch.empty_like(keys, dtype=kind)
            rotate_into(out, keys, cos, sin, layout)
            expected = rotate(keys.double(), cos.double(), sin.double(), layout)
            yield {
                "context": f"{tokens} keys of {size} in {states}, {rotary} rotate",
                "recipe": str(Recipe()),
                "path": f"rotation, {pairing}",
                "error": relative_error(out.double(), expected),
                "budget": 2 * torch.finfo(kind).eps,
            }


def of_kind(campaign: Campaign, kind: str, dtype: str, lengths: Sequence[int]) -> Iterator[Record]:
    """Yield the rows of ``compare`` for a miniature, and, if it supports recomputation, rows with
    all tokens recomputed."""
    family, settings, _ = KINDS[kind]
    hf_model: Any = miniature(AutoConfig.for_model(family, **settings))
    exact_model = copy.deepcopy(hf_model).to(campaign.device).double()
    exact_model.set_experts_implementation("eager")  # The other kernels do not support float64.
    exact = block_model(exact_model)
    model = block_model(hf_model.to(campaign.device, floating_type(dtype)))
    prompt = prompt_of(lengths, MINIATURE_VOCABULARY)
    paths = ("relay", "copy") if model.supports_relay else ("copy",)
    recipes = [Recipe(), Recipe(promote=1)]
    everything = Block(" ".join(block.text for block in prompt.context))
    full = BlockPrompt((everything,), prompt.final)
    if can_recompute(model):
        recipes.append(Recipe(recompute=1.0))
    for recipe in recipes:
        judged = (full, Recipe()) if recipe.recompute else (prompt, recipe)
        judge = Judge(model, exact, *judged)
        for path in paths:
            engine = campaign.engine(model, recipe=recipe, **PATHS[path])
            where = {"context": "mixed", "recipe": str(recipe), "path": path}
            yield where | judge.logits(engine, 0.0, prompt)


def compare(
    campaign: Campaign, size: int, ratio: int, dtype: str, contexts: Mapping[str, Sequence[int]]
) -> Iterator[Record]:
    """Yield a row per context, recipe and path, with ``error`` and ``budget`` of the logits or of
    the greedy tokens."""
    longest = sum(max(contexts.values(), key=sum))  # One prompt in the batch repeats a block.
    most = 2 * longest + FINAL_TOKENS + NEW_TOKENS + 1
    hf_model = random_model(size, HEADS // ratio, most, floating_type(dtype)).to(campaign.device)
    exact = block_model(copy.deepcopy(hf_model).double())
    model = block_model(hf_model)
    for name, lengths in contexts.items():
        prompt = prompt_of(lengths)
        plain = Recipe()
        repaired = [] if name == LARGE else [adapted(model), Recipe(promote=1)]
        for recipe in (plain, *repaired):
            judge = Judge(model, exact, prompt, recipe)
            for path, options in PATHS.items():
                engine = campaign.engine(model, recipe=recipe, **options)
                where = {"context": name, "recipe": str(recipe), "path": path}
                extra = INT8_ERROR * (path == "int8")
                yield where | judge.logits(engine, extra)
                if recipe == plain:
                    yield where | {"path": f"{path}, batch"} | judge.batch(engine, extra)


def in_turns(
    campaign: Campaign, size: int, ratio: int, dtype: str, sizes: Sizes
) -> Iterator[Record]:
    """Yield a row per path with the largest error of the logits in several forward passes with one
    cache, which a GPU replays as graphs."""
    lengths = sizes.contexts["mixed"]
    most = sum(lengths) + sum(sizes.turns)
    hf_model = random_model(size, HEADS // ratio, most, floating_type(dtype)).to(campaign.device)
    exact, model = block_model(copy.deepcopy(hf_model).double()), block_model(hf_model)
    blocks = random_ids(lengths, VOCABULARY)
    turns = [torch.tensor([ids]) for ids in random_ids(sizes.turns, VOCABULARY, seed=1)]

    def logits(model: BlockModel, path: Any) -> Tensor:
        cache = model.cache_for(placed_context(model, blocks), assembly=path)
        return torch.stack([model.next_logits(ids, cache) for ids in turns])

    expected = logits(exact, "copy")
    found = {path: logits(model, path).double() for path in ("copy", "relay")}
    rounding = relative_error(found["copy"], expected)
    for path, answer in found.items():
        yield {
            "context": f"mixed, {len(turns)} turns",
            "recipe": str(Recipe()),
            "path": f"{path}, turns",
            "error": relative_error(answer, expected),
            "budget": max(LOGITS[torch.float32], ROUNDING * rounding),
            "rounding": rounding,
        }


def recomputed(
    campaign: Campaign, size: int, ratio: int, dtype: str, lengths: Sequence[int]
) -> Iterator[Record]:
    """Yield a row per share and path, with ``error`` and ``budget`` of the logits."""
    most = sum(lengths) + FINAL_TOKENS + NEW_TOKENS
    hf_model = random_model(size, HEADS // ratio, most, floating_type(dtype)).to(campaign.device)
    exact = copy.deepcopy(hf_model).double()
    model, prompt = block_model(hf_model), prompt_of(lengths)
    answer = random_ids([NEW_TOKENS], VOCABULARY, seed=1)[0]
    ids = model.tokenizer.prompt_ids(prompt)
    context = placed_context(model, ids.context)
    may_change = [place > 0 for place in range(len(lengths))]
    for share in SHARES:
        with model.lock:
            changed, chosen = recompute(model, context, may_change, ids.final, share)
        blocks = [*ids.context, [*ids.final, *answer[:-1]]]
        expected, rounded = (
            recomputed_logits(one, blocks, chosen)[-NEW_TOKENS:] for one in (exact, hf_model)
        )
        rounding = relative_error(rounded, expected)
        for path in ("relay", "copy"):
            # Select the tokens without an engine, because an engine may batch blocks differently
            # and therefore select different tokens.
            cache = model.cache_for(changed, assembly=path)
            found = model.answer_logits(changed.token_ids, ids.final, answer, cache)
            yield {
                "context": f"mixed, {len(chosen)} recomputed",
                "recipe": str(Recipe(recompute=share)),
                "path": path,
                "error": relative_error(found.float(), expected),
                "budget": max(LOGITS[torch.float32], ROUNDING * rounding),
                "rounding": rounding,
            }


def recomputed_logits(
    hf_model: Any, blocks: Sequence[Sequence[int]], chosen: Sequence[int]
) -> Tensor:
    """Return the logits ``[final tokens, vocab]`` of a dense forward pass with recomputed tokens.

    The pass computes the context in block mode, the selected tokens again with full attention, and
    the final block, which attends to the recomputed tokens."""
    *context, final = blocks
    tokens = [token for ids in context for token in ids]
    count, last = len(tokens), len(tokens) + len(final)
    ids = torch.tensor([*tokens, *(tokens[place] for place in chosen), *final])
    places = torch.tensor([*range(count), *chosen, *range(count, last)])
    seen = places[:, None] >= places
    seen[:, chosen] = False
    seen[:count] = False
    seen[:count, :count] = block_mask([*map(len, blocks)])[:count, :count]
    bias = torch.zeros(1, 1, *seen.shape, dtype=hf_model.dtype)
    bias.masked_fill_(~seen, torch.finfo(hf_model.dtype).min)
    with torch.inference_mode():
        out = hf_model(
            input_ids=ids[None].to(hf_model.device),
            attention_mask=bias.to(hf_model.device),
            position_ids=places[None].to(hf_model.device),
            use_cache=False,
        )
    logits: Tensor = out.logits[0, -len(final) :].float()
    return logits


class Judge:
    """Compares engines with the oracle for one prompt and recipe.

    Args:
        model: The model of the engines.
        exact: The same model in float64.
        prompt: The prompt.
        recipe: The recipe.
    """

    def __init__(
        self, model: BlockModel, exact: BlockModel, prompt: BlockPrompt, recipe: Recipe
    ) -> None:
        self.prompt, self.recipe, self.exact = prompt, recipe, exact
        self.answer = random_ids([NEW_TOKENS], model.config.vocab_size, seed=1)[0]
        self.expected = RecipeOracle(exact, prompt, recipe).logits(self.answer[:-1])
        dense = RecipeOracle(model, prompt, recipe).logits(self.answer[:-1])
        self.rounding = relative_error(dense, self.expected)
        self.budget = max(LOGITS[torch.float32], ROUNDING * self.rounding)

    def logits(
        self, engine: BlockAttentionEngine, extra: float, prompt: BlockPrompt | None = None
    ) -> Record:
        """Compare the logits of a given answer, first with computed, then with reused blocks.

        ``prompt``: The same tokens, split into different blocks. Default: the oracle's prompt.
        """
        errors = []
        for _ in range(2):
            found = engine.answer_logits(prompt or self.prompt, self.answer, mode="block")
            errors.append(relative_error(found.float(), self.expected))
        return self._row(max(errors), extra)

    def batch(self, engine: BlockAttentionEngine, extra: float) -> Record:
        """Compare the greedy answers to a batch: the prompt, the prompt with reversed blocks, and
        the prompt with a repeated block."""
        blocks, final = self.prompt.context, self.prompt.final
        orders = [blocks, blocks[::-1], (blocks[-1], blocks[-1])]
        prompts = [BlockPrompt(order, final) for order in orders]
        answers = engine.generate_batch(prompts, batch_size=len(prompts), **GREEDY)
        errors = []
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle = RecipeOracle(self.exact, prompt, self.recipe)
            errors.append(shortfall(oracle.logits(answer.token_ids[:-1]), answer.token_ids) / 2)
        return self._row(max(errors), extra)

    def _row(self, error: float, extra: float) -> Record:
        return {"error": error, "budget": self.budget + extra, "rounding": self.rounding}


def shortfall(logits: Tensor, tokens: Sequence[int]) -> float:
    """Return the largest difference between the best score and that of the generated token,
    relative to the largest logit. ``logits``: ``[len(tokens), vocab]``."""
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max() / logits.abs().max())


def random_model(size: int, kv_heads: int, max_tokens: int, dtype: torch.dtype) -> Any:
    """Create a two-layer Llama with weights that are large enough for non-uniform attention."""
    make: Any = LlamaConfig
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=max_tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    factory: Any = AutoModelForCausalLM
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(size + kv_heads)
        model = factory.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def block_model(hf_model: Any) -> BlockModel:
    tokenizer = counting_tokenizer(hf_model.config.vocab_size)
    return BlockModel(hf_model, tokenizer, pack_weights=False)


def prompt_of(lengths: Sequence[int], vocabulary: int = VOCABULARY) -> BlockPrompt:
    *context, final = (
        " ".join(f"t{token}" for token in ids)
        for ids in random_ids([*lengths, FINAL_TOKENS], vocabulary)
    )
    return BlockPrompt(tuple(map(Block, context)), final)


def adapted(model: BlockModel) -> Recipe:
    """Return a recipe with a sink and a random adapter."""
    generator = torch.Generator().manual_seed(3)
    layers = []
    for keys, values in model.profile.layer_outlines:
        both = keys.size + values.size
        shapes = (keys.heads, both, both), (keys.heads, NUM_PLACES, both)
        layers.append(
            LayerCorrection(*(torch.randn(s, generator=generator) / both for s in shapes))
        )
    adapter = Correction(tuple(layers), "head:4", model.fingerprint)
    return Recipe("head:4", adapter, fingerprints=(model.fingerprint,))
