"""BlockModel: a transformers model that encodes blocks and generates from placed blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.errors import ContextOverflowError, UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Assembly, Context
from blockattn_rag.model import decoding, loading, relay
from blockattn_rag.model.exclusion import lock_of, turn_to_draw
from blockattn_rag.model.fingerprint import Identity
from blockattn_rag.model.graphs import record_graphs
from blockattn_rag.model.packing import pack_linears
from blockattn_rag.model.probe import (
    AttentionProfile,
    check_ready,
    layer_states,
    profile_attention,
    vocabulary_size,
)
from blockattn_rag.model.requests import EncodeRequest
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.tokenization import BlockTokenizer

if TYPE_CHECKING:
    from torch import Tensor

# Published models that were block-fine-tuned before our training began to say so in the config.
_KNOWN_BLOCK_TUNED = ("ldsjmdy/Tulu3-Block-FT", "hxia7/Llama-3.2-1B-Block-FT")

# Tokens, padding included, of one encoding batch: enough to keep the matmuls large.
_BATCH_TOKENS = {"cpu": 2048}
_BATCH_TOKENS_ACCELERATOR = 16384

# Past this many query tokens, rotating them for every block costs more than moving the keys once.
_RELAY_MAX_FINAL_TOKENS = 1024


class BlockModel:
    """A causal language model of transformers, seen as a machine for blocks.

    Its methods run one at a time, over all ``BlockModel``s of one ``hf_model``. Who holds ``lock``
    keeps the others out over several calls.

    Adapters may be switched, hooks and scales be set between requests: blocks are then known by
    another fingerprint. Weights that are written without a trace need a new ``BlockModel``.

    Args:
        hf_model: the model, on its device, in its dtype.
        tokenizer: its transformers tokenizer, or a ``BlockTokenizer`` of it.
        name: what to call it in messages; default: where it was loaded from.
        pack_weights: on the CPU, keep a second copy of the weights of linear layers that serves
            questions faster, where it fits (``packing.pack_linears``).
        cuda_graphs: record the forwards of questions and of single tokens as CUDA graphs when they
            first come (not run on a GPU yet).

    Raises:
        UnsupportedModelError: blocks of this model cannot be moved exactly.
        ValueError: CUDA graphs were asked for and the model is elsewhere, or autocast is on.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        tokenizer: Any,
        *,
        name: str = "",
        pack_weights: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        self.hf_model = hf_model.eval()
        is_ready = isinstance(tokenizer, BlockTokenizer)
        self.tokenizer: BlockTokenizer = tokenizer if is_ready else BlockTokenizer(tokenizer)
        self.name = name or str(
            getattr(hf_model.config, "_name_or_path", "") or type(hf_model).__name__
        )
        self.lock = lock_of(hf_model)
        self._identity: Identity | None = None
        with self.lock:
            self.profile: AttentionProfile = profile_attention(hf_model)
        parameters = inspect.signature(hf_model.forward).parameters
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        if pack_weights:
            pack_linears(hf_model)
        if cuda_graphs:
            record_graphs(hf_model)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        pack_weights: bool = True,
        cuda_graphs: bool = False,
        **kwargs: Any,
    ) -> BlockModel:
        """Load by path, hub id or ``"bundled"``; a ready model needs its ``tokenizer``.

        ``device``, ``dtype`` and ``kwargs`` are those of ``loading.load_model``; a ready model is
        taken as it is.
        """
        speed: dict[str, Any] = {"pack_weights": pack_weights, "cuda_graphs": cuda_graphs}
        if isinstance(model, (str, Path)):
            if tokenizer is None or isinstance(tokenizer, (str, Path)):
                tokenizer = loading.load_tokenizer(tokenizer or model)
            loaded = loading.load_model(model, device=device, dtype=dtype, **kwargs)
            return cls(loaded, tokenizer, name=str(model), **speed)
        if tokenizer is None:
            raise ValueError("a ready model was given without its tokenizer; pass tokenizer=...")
        if isinstance(tokenizer, (str, Path)):
            tokenizer = loading.load_tokenizer(tokenizer)
        return cls(model, tokenizer, **speed)

    @property
    def config(self) -> Any:
        return self.hf_model.config

    @property
    def device(self) -> torch.device:
        return self.hf_model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf_model.dtype

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.profile.max_context_tokens

    @property
    def is_block_tuned(self) -> bool:
        """Whether the model is known to have been fine-tuned with the block mask."""
        return (
            bool(getattr(self.config, "block_attention", None)) or self.name in _KNOWN_BLOCK_TUNED
        )

    @property
    def fingerprint(self) -> str:
        """Identity of what decides keys and values: 64 hex digits.

        Reads all weights once, and again after the model was set otherwise: an adapter switched, a
        hook or a scale set. Whether it was is looked at in each call (0.3 ms for 30 layers, some ms
        with adapters on each of their projections), so ask once for all blocks of a request.

        Raises:
            ValueError: it must be computed, and autocast is on or the model is in training mode.
        """
        identity = self._identity
        if identity is None or not identity.holds():
            identity = self._identify()
        return identity.fingerprint

    def _identify(self) -> Identity:
        """Measure the model as it is set now, unless another thread just did."""
        with self.lock:
            known = self._identity
            if known is not None and known.holds():
                return known
            if known is not None:
                # What was measured of the model before may not be true of it any more.
                if not self.hf_model.training:
                    self.hf_model.eval()  # adapters come as for training, with dropout
                self.profile = profile_attention(self.hf_model)
                for name in ("supports_relay", "_one_token"):
                    vars(self).pop(name, None)
            self._identity = Identity(self.hf_model, self.tokenizer)
            return self._identity

    @property
    def batch_tokens(self) -> int:
        """Tokens of one encoding batch, padding included, unless the call says otherwise."""
        return _BATCH_TOKENS.get(self.device.type, _BATCH_TOKENS_ACCELERATOR)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token."""
        return self._one_token.nbytes

    def could_have_computed(self, kv: BlockKV) -> bool:
        """Whether a block has this model's layers, heads, head sizes, number type and tokens."""
        if int(kv.token_ids.max()) >= vocabulary_size(self.hf_model):
            return False
        return _outlines(kv) == _outlines(self._one_token)

    @cached_property
    def _one_token(self) -> BlockKV:
        """A block of one token: what this model's blocks are like."""
        with self.lock:
            return self._encode_batch([EncodeRequest([0], "", "")])[0]

    def encode(
        self, requests: Sequence[EncodeRequest], *, batch_tokens: int | None = None
    ) -> Iterator[list[BlockKV]]:
        """Compute blocks' keys and values at positions 0..n-1, each block alone.

        Blocks are batched by length and padded on the right, which a causal mask makes harmless.

        Args:
            requests: blocks of at least one token.
            batch_tokens: tokens of one batch, padding included.

        Yields:
            One batch's blocks at a time, longest first: not in the order of ``requests``.

        Raises:
            ContextOverflowError: a block alone is longer than the model's context window.
            ValueError: autocast is on, or the model is in training mode.
        """
        budget = batch_tokens or self.batch_tokens
        order = sorted(requests, key=lambda request: -len(request.token_ids))
        if order and len(order[0].token_ids) > self.max_context_tokens:
            raise ContextOverflowError(
                f"a block has {len(order[0].token_ids)} tokens, but the model holds at most "
                f"{self.max_context_tokens}; split the passage into smaller chunks"
            )
        while order:
            rows = _batch_rows([len(request.token_ids) for request in order], budget)
            batch, order = order[:rows], order[rows:]
            with self.lock:
                computed = self._encode_batch(batch)
            yield computed

    @torch.inference_mode()
    def _encode_batch(self, batch: Sequence[EncodeRequest]) -> list[BlockKV]:
        check_ready(self.hf_model)
        fingerprint = self.fingerprint
        width = max(len(request.token_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, : len(request.token_ids)] = torch.tensor(request.token_ids)
        # Without the config the cache keeps all tokens of sliding-window layers too: the block
        # may come to stand right before the final block, or anywhere else.
        cache = DynamicCache()
        self.hf_model(
            input_ids=ids.to(self.device),
            past_key_values=cache,
            use_cache=True,
            **self._last_logits_only,
        )
        states = layer_states(cache)
        return [_cut_out(states, row, request, fingerprint) for row, request in enumerate(batch)]

    @cached_property
    def end_token_ids(self) -> set[int]:
        """Tokens that end an answer."""
        return decoding.end_token_ids(self.hf_model, self.tokenizer.tokenizer)

    @cached_property
    def supports_relay(self) -> bool:
        """Whether relay attention gives this model's own logits: measured, on a short probe."""
        with self.lock:
            return relay.is_exact(self)

    def choose_assembly(self, assembly: Assembly, final_tokens: int) -> Literal["relay", "copy"]:
        """What ``assembly`` means for this model and a final block of that many tokens.

        Raises:
            UnsupportedModelError: relay was asked for and this model cannot do it.
        """
        if assembly == "relay" and not self.supports_relay:
            raise UnsupportedModelError(
                f"{self.name} cannot use assembly='relay': sliding windows, soft caps, attention "
                "sinks and attention outside transformers' interface need assembly='copy' or 'auto'"
            )
        if assembly == "auto":
            relays = self.supports_relay and final_tokens <= _RELAY_MAX_FINAL_TOKENS
            return "relay" if relays else "copy"
        return assembly

    def cache_for(
        self, *contexts: Context, assembly: Literal["relay", "copy"] = "copy"
    ) -> DynamicCache | None:
        """A transformers cache that holds the contexts, one a row, ready for the final blocks.

        Shorter contexts are padded on the left (copy path only; relay has nothing to pad). None if
        no context holds a token.
        """
        width = max(context.num_tokens for context in contexts)
        if not width:
            return None
        layouts = self.profile.layouts
        if assembly == "relay":
            return relay.relay_cache(self.hf_model, contexts, layouts, width)
        return decoding.copied_cache(self.hf_model.config, contexts, layouts, width)

    @contextmanager
    def running(self, sampling: Sampling) -> Iterator[None]:
        """Have the model for oneself, to generate with these options."""
        draws = decoding.draws_tokens(sampling)
        turn = turn_to_draw(alone=sampling.seed is not None) if draws else nullcontext()
        with turn, self.lock:
            yield

    def generate(
        self,
        context_ids: Sequence[int],
        final_ids: Sequence[int],
        sampling: Sampling,
        *,
        cache: DynamicCache | None = None,
        on_token: Callable[[int], None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[int]:
        """Generate with transformers' own ``generate``.

        Args:
            context_ids: tokens before the final block.
            final_ids: tokens of the final block, at least one.
            cache: KV of ``context_ids`` (block mode), or None to compute all (full mode).
            on_token: called with each new token as it comes.
            is_cancelled: asked after each token; True ends the generation.

        Returns:
            The new token ids, end-of-sequence token included.
        """
        ids = [*context_ids, *final_ids]
        limit = self.room_for(len(ids), sampling)
        with self.running(sampling):
            return decoding.generate(
                self.hf_model,
                self.tokenizer.tokenizer,
                ids,
                sampling,
                limit,
                cache,
                on_token,
                is_cancelled,
            )

    def generate_batch(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[int]]],
        sampling: Sampling,
        *,
        cache: DynamicCache | None = None,
        on_tokens: Callable[[list[int]], bool] | None = None,
    ) -> list[list[int]]:
        """Generate for several (context ids, final ids) in one batch; see ``generate``.

        Args:
            prompts: of unequal lengths, padded on the left of each part.
            cache: KV of the contexts, one a row, or None to compute all.
            on_tokens: called after each step with the newest token of every row (padding in rows
                that have ended); True ends the batch. With beams, a row is a beam.
        """
        longest = max(len(context) + len(final) for context, final in prompts)
        limit = self.room_for(longest, sampling)
        with self.running(sampling):
            return decoding.generate_batch(
                self.hf_model,
                self.tokenizer.tokenizer,
                prompts,
                sampling,
                limit,
                cache,
                on_tokens,
            )

    @property
    def can_batch(self) -> bool:
        """Whether prompts of unequal length can share a batch exactly.

        Padding between context and final block widens the distance that a sliding window counts.
        """
        return all(window is None for window in self.profile.windows)

    def batches_exactly(self, sampling: Sampling) -> bool:
        """Whether ``can_batch`` holds, and for these options as well."""
        return self.can_batch and decoding.batches_exactly(self.hf_model, sampling)

    def room_for(self, prompt_tokens: int, sampling: Sampling) -> int:
        """How many tokens may be generated after a prompt: as asked, or what the window leaves.

        Raises:
            ContextOverflowError: the prompt leaves no room for a single token.
        """
        room = self.max_context_tokens - prompt_tokens
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {prompt_tokens} tokens, but the model holds at most "
                f"{self.max_context_tokens}, the answer included; retrieve fewer or shorter "
                "passages"
            )
        return min(room, sampling.max_new_tokens)

    def next_logits(self, ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """Logits ``[vocab]`` of the token after ``ids`` ``[1, n]``, after what ``cache`` holds."""
        with self.lock, torch.inference_mode(), relay.plan_scope():
            out = self.hf_model(
                input_ids=ids.to(self.device),
                past_key_values=cache,
                use_cache=True,
                **self._last_logits_only,
            )
        return out.logits[0, -1]


def _cut_out(
    states: Sequence[tuple[Tensor, Tensor]], row: int, request: EncodeRequest, fingerprint: str
) -> BlockKV:
    """One row's real tokens, copied: a view would keep the whole batch alive in the store."""
    count = len(request.token_ids)
    return BlockKV(
        keys=tuple(keys[row, :, :count].clone() for keys, _ in states),
        values=tuple(values[row, :, :count].clone() for _, values in states),
        token_ids=torch.tensor(request.token_ids, dtype=torch.long),
        fingerprint=fingerprint,
        digest=request.digest,
        handle=request.handle,
    )


def _outlines(kv: BlockKV) -> list[tuple[int, int, torch.dtype]]:
    """Heads, head size and number type of each layer's keys, and then values."""
    return [(states.shape[0], states.shape[2], states.dtype) for states in (*kv.keys, *kv.values)]


def _batch_rows(lengths: Sequence[int], budget: int) -> int:
    """How many of the blocks, longest first, make a batch: up to ``budget`` tokens with padding.

    Blocks below 9/10 of the longest wait for the next batch, as their padding costs more than a
    smaller batch does, once an eighth of the budget is filled.
    """
    width = lengths[0]
    most, least = max(1, budget // width), max(1, budget // 8 // width)
    alike = sum(10 * length >= 9 * width for length in lengths[:most])
    return min(most, len(lengths), max(alike, least))
