"""BlockModel: a transformers model that encodes blocks and generates answers from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.errors import ContextOverflowError, GrammarError, UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model import decoding, loading
from blockattn_rag.model.caches import ContextCache
from blockattn_rag.model.constraint import AnswerRules
from blockattn_rag.model.context_model import ContextModel
from blockattn_rag.model.encoding import EncodeRequest, batches, encode_batch
from blockattn_rag.model.exclusion import turn_to_draw
from blockattn_rag.model.fingerprint import fingerprint_of, snapshot
from blockattn_rag.model.packing import pack_linears
from blockattn_rag.model.probe import vocabulary_size
from blockattn_rag.model.relay_attention import last_logits
from blockattn_rag.model.repetition import LoopGuard
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.model.weight_files import ChangedFileError, WeightFiles
from blockattn_rag.output.grammar import Grammar
from blockattn_rag.prompts.tokenization import BlockTokenizer


class BlockModel(ContextModel):
    """Causal language model from transformers that encodes blocks and generates answers from them.

    All ``BlockModel`` objects with the same ``hf_model`` share a lock, so only one of them runs the
    model at a time. To keep other threads out between several calls, hold ``lock``.

    Config, weights and active adapters must not change after construction; ``check_unchanged``
    detects most changes. Patched models (hooks, replaced ``forward`` methods) are not supported.

    Args:
        hf_model: The model, already on its device and in its dtype.
        tokenizer: The model's transformers tokenizer, or a ``BlockTokenizer`` for it.
        name: Model name shown in messages. Default: the name that the model was loaded with.
        pack_weights: Whether a model on the CPU keeps a packed copy of its linear weights if memory
            allows, which speeds up short inputs; see ``packing.pack_linears``.
        files: Files with exactly the model's weights. The fingerprint hashes them, not the tensors.

    Raises:
        UnsupportedModelError: Block mode would not be exact for the model.
        ValueError: Autocast is enabled.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        tokenizer: Any,
        *,
        name: str = "",
        pack_weights: bool = True,
        files: WeightFiles | None = None,
    ) -> None:
        is_ready = isinstance(tokenizer, BlockTokenizer)
        self.tokenizer: BlockTokenizer = tokenizer if is_ready else BlockTokenizer(tokenizer)
        self.name = name or str(hf_model.config.name_or_path or type(hf_model).__name__)
        super().__init__(hf_model)
        if pack_weights:
            pack_linears(hf_model)
        self._snapshot = snapshot(hf_model)
        self._files = files

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        revision: str | None = None,
        pack_weights: bool = True,
        **kwargs: Any,
    ) -> BlockModel:
        """Load a model by path, hub id or short name, as ``loading.load_model`` does.

        Also accepts a loaded model together with its ``tokenizer``, or the tokenizer's path or hub
        id. A loaded model keeps its device and dtype.
        """
        if tokenizer is None and not isinstance(model, (str, Path)):
            raise ValueError("A loaded model requires its tokenizer: pass tokenizer=...")
        if isinstance(tokenizer, (str, Path)):
            tokenizer = loading.load_tokenizer(tokenizer)
        name, files = "", None
        if isinstance(model, (str, Path)):
            name, commit = str(model), loading.commit_of(model, revision)
            loading.check_config(model, revision=commit)
            if tokenizer is None:
                tokenizer = loading.load_tokenizer(model, revision=commit)
            model, files = loading.load_with_files(
                model, commit, device=device, dtype=dtype, **kwargs
            )
        return cls(model, tokenizer, name=name, pack_weights=pack_weights, files=files)

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.hf_model, "peft_config")

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary. Valid token ids are smaller."""
        return vocabulary_size(self.hf_model)

    @property
    def dtype(self) -> torch.dtype:
        return self.hf_model.dtype

    @property
    def max_context_tokens(self) -> int:
        """Maximum combined length of prompt and answer, in tokens."""
        return self.profile.max_context_tokens

    @cached_property
    def fingerprint(self) -> str:
        """Hash of weights, config, dtype, tokenizer and active adapters, 64 hex digits.

        The first access reads all weights, or the weight files unless their digests are cached.
        """
        with self.lock:
            self.check_unchanged()
            # Files that have changed since the weights were loaded belong to another model.
            files = self._files if self._files is not None and self._files.is_current else None
            identity = partial(fingerprint_of, self.hf_model, self.tokenizer, self.profile.kinds)
            try:
                return identity(files)
            except ChangedFileError:
                return identity()

    def check_unchanged(self) -> None:
        """Raise ``UnsupportedModelError`` if config, weights or adapters have changed since
        loading, as far as ``fingerprint.snapshot`` detects changes."""
        if snapshot(self.hf_model) != self._snapshot:
            raise UnsupportedModelError(
                f"The weights, adapters or config of {self.name} have changed since it was loaded, "
                "so stored blocks no longer match it: create a new engine for the changed model."
            )

    @property
    def batch_tokens(self) -> int:
        """Default size of an encoding batch in tokens, including padding. Large enough for
        efficient matrix products (``benchmarks/efficiency.py``)."""
        return 2048 if self.device.type == "cpu" else 16384

    @property
    def bytes_per_token(self) -> int:
        """Size of one token's unquantized keys and values in all layers, in bytes."""
        return sum(heads * size * kind.itemsize for heads, size, kind in self.profile.token_outline)

    def encode(
        self, requests: Sequence[EncodeRequest], *, batch_tokens: int | None = None
    ) -> Iterator[list[BlockKV]]:
        """Compute the keys and values of each block independently, at positions 0..n-1.

        Args:
            requests: Blocks to encode, with at least one token each.
            batch_tokens: Size of a batch in tokens, including padding. Default: the property
                ``batch_tokens``.

        Yields:
            Encoded blocks of one batch, longest first, not in the order of ``requests``.

        Raises:
            ContextOverflowError: A block, with its sink, exceeds the model's context window.
            ValueError: Autocast is enabled, or the model is in training mode.
            UnsupportedModelError: The model has changed since it was loaded.
        """
        for batch in batches(requests, batch_tokens or self.batch_tokens, self.max_context_tokens):
            with self.lock:
                self.check_unchanged()
                computed = encode_batch(self.hf_model, batch, self.fingerprint, self.profile)
            yield computed

    @cached_property
    def end_token_ids(self) -> set[int]:
        """Ids of the tokens that end an answer, from the generation config or the tokenizer."""
        return decoding.end_token_ids(self.hf_model, self.tokenizer.tokenizer)

    @cached_property
    def rules(self) -> AnswerRules:
        """Grammar matchers and loop guards for this model's answers."""
        return AnswerRules(self.tokenizer.tokenizer, self.end_token_ids, self.name)

    def loop_guard(self, sampling: Sampling) -> LoopGuard | None:
        """Create a loop guard for one answer. None unless ``decoding.takes_likeliest`` is True."""
        is_on = decoding.takes_likeliest(self.hf_model, sampling)
        return self.rules.loop_guard(sampling.grammar) if is_on else None

    @contextmanager
    def running(self, sampling: Sampling) -> Iterator[None]:
        """Context manager that keeps other threads from running the model during generation."""
        draws = decoding.draws_tokens(sampling)
        with turn_to_draw(self.lock, alone=sampling.seed is not None) if draws else self.lock:
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
        """Generate one answer's tokens, including the end token; see ``generate_batch``.

        Args:
            cache: KV of ``context_ids`` (block mode). None: prefill all tokens (full mode).
            on_token: Callback for each new token.
        """

        def on_tokens(newest: list[int]) -> Sequence[bool]:
            if on_token is not None:
                on_token(newest[0])
            return ()

        return self.generate_batch(
            [(context_ids, final_ids)],
            sampling,
            cache=cache,
            on_tokens=on_tokens,
            is_cancelled=is_cancelled,
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[int]]],
        sampling: Sampling,
        *,
        cache: DynamicCache | None = None,
        on_tokens: Callable[[list[int]], Sequence[bool]] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        grammars: Sequence[Grammar | None] | None = None,
        on_failure: Callable[[int, GrammarError], object] | None = None,
    ) -> list[list[int]]:
        """Generate answers to prompts with transformers' ``generate``. Returns their token ids.

        Stop strings are only handled in beam search. Otherwise, the caller must search the answers
        for ``decoding.stop_strings``, and end rows through ``on_tokens``.

        Args:
            prompts: Token ids of each prompt's context, and of its final block.
            sampling: Sampling options.
            cache: KV of the contexts, one per row. None: prefill all tokens.
            on_tokens: Callback after each step. Receives the newest token of every row (padding in
                rows that have ended), and returns whether each row has ended. Unused in beam
                search.
            is_cancelled: Callback after each step. If it returns True, the batch ends.
            grammars: Grammar of each answer. Default: the grammar of ``sampling`` for all.
            on_failure: Callback for a row whose grammar fails; receives the row's index and the
                error. ``on_tokens`` must then end the row. Default: raise the error.

        Raises:
            ContextOverflowError: A prompt leaves no room for an answer.
            GrammarError: A grammar cannot be compiled, or fails without ``on_failure``.
            ValueError: The model has sliding windows, and final blocks of different lengths follow
                a cache: windows would include the padding before shorter blocks. See also
                ``decoding.generate``.
        """
        lengths = {len(final) for _, final in prompts}
        if cache is not None and self.profile.has_windows and len(lengths) > 1:
            raise ValueError(
                f"Found final blocks of {min(lengths)} to {max(lengths)} tokens in a batch, but "
                f"{self.name} has sliding windows, which require equal lengths: generate the "
                "answers one by one, or without a cache."
            )
        grammars = [sampling.grammar] * len(prompts) if grammars is None else grammars
        ends_loops = decoding.takes_likeliest(self.hf_model, sampling)
        matchers = [self.rules.matcher(one, ends_loops=ends_loops) for one in grammars]
        longest = max(len(context) + len(final) for context, final in prompts)
        with self.running(sampling):
            if isinstance(cache, ContextCache) and cache.takes_one_token:
                ((_, final),) = prompts
                for token in final[:-1]:  # `generate` processes the last token.
                    last_logits(self.hf_model, torch.tensor([[token]]), cache, 1)
            return decoding.generate(
                self.hf_model,
                self.tokenizer.tokenizer,
                prompts,
                sampling,
                self.room_for(longest, sampling),
                cache,
                on_tokens=on_tokens,
                is_cancelled=is_cancelled,
                matchers=matchers,
                on_failure=on_failure,
            )

    def batches_exactly(self, sampling: Sampling) -> bool:
        """Whether batching prompts of different lengths leaves their answers unchanged. This is not
        so with sliding windows and states, which would include the padding."""
        is_alone = self.profile.has_windows or self.profile.has_states
        return not is_alone and decoding.batches_exactly(self.hf_model, sampling)

    def room_for(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Maximum number of new tokens: ``max_new_tokens``, or fewer if the context window ends
        earlier. Raises ``ContextOverflowError`` if the prompt leaves no room."""
        room = self.max_context_tokens - prompt_tokens
        if room < 1:
            raise ContextOverflowError(
                f"The prompt has {prompt_tokens} tokens, but the model accepts at most "
                f"{self.max_context_tokens}, including the answer: retrieve fewer or shorter "
                "passages"
            )
        return min(room, sampling.max_new_tokens)

    def answer_logits(
        self,
        context_ids: Sequence[int],
        final_ids: Sequence[int],
        answer_ids: Sequence[int],
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """Logits that predict each token of an existing answer, ``[answer tokens, vocab]``.
        ``cache``: See ``generate``."""
        given = [*([] if cache is not None else context_ids), *final_ids, *answer_ids[:-1]]
        with self.lock:
            return last_logits(self.hf_model, torch.tensor([given]), cache, len(answer_ids))

    def next_logits(self, ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """Next-token logits ``[vocab]`` after ``ids`` ``[1, n]``, which are added to ``cache``."""
        with self.lock:
            return last_logits(self.hf_model, ids, cache, 1)[0]
