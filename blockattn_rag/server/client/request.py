"""Requests to a server as token ids, and answers from the tokens that it returns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.pending import PendingAnswer
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Clock, FinishReason, Generation, Mode, ReuseStats
from blockattn_rag.errors import ProtocolError, ServingError
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.server.protocol import BlockPlan
from blockattn_rag.server.served_blocks import ServedBlocks, reuse_of
from blockattn_rag.server.validation import shown

_RENAMED = {"min_new_tokens": "min_tokens"}
"""vLLM's names for arguments of transformers."""

_SUPPORTED = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "min_tokens"),
    *("logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
    *("priority", "repetition_detection"),
)
"""Arguments of vLLM in addition to those of ``Sampling``."""

_LEAST_TOP_P = 1e-6
_MOST_TOKENS = 1 << 31


def recipe_asked(recipe: RecipeLike | None) -> RecipeOutline | None:
    """Recipe that the server must have. None: any recipe.

    Raises:
        ValueError: The folder has no recipe, or the recipe is damaged.
    """
    if recipe is None or recipe == AUTO:
        return None
    if isinstance(recipe, str) and (named := RecipeOutline.parsed(recipe)) is not None:
        return named
    return (recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)).outline


def check_possible(options: GenerateOptions) -> None:
    """Raise ValueError for options that a server does not support."""
    known = (*_SUPPORTED, *_RENAMED)
    if unknown := sorted(options.sampling.extra.keys() - set(known)):
        raise ValueError(
            f"found {', '.join(unknown)}, which servers do not support; expected options of "
            f"generate, or {', '.join(known)}"
        )


class Tokenised(NamedTuple):
    """A block's token ids, and their ``token_digest``."""

    ids: list[int]
    digest: str


class TokenPrompt(NamedTuple):
    """A prompt as token ids.

    ``blocks``: context blocks that have tokens; ``context``: their tokens, the first one with BOS;
    ``final``: token ids of the final block, at least one.
    """

    blocks: list[Block]
    context: list[Tokenised]
    final: list[int]

    @property
    def ids(self) -> list[int]:
        """All token ids, in order."""
        return [*(token for one in self.context for token in one.ids), *self.final]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each context block."""
        return tuple(len(one.ids) for one in self.context)


def completion_body(
    model: str, ids: Sequence[int], plan: BlockPlan | None, limit: int, sampling: Sampling
) -> dict[str, Any]:
    """Body of a completion request.

    Args:
        model: Name of the model at the server.
        ids: Token ids of the complete prompt.
        plan: How the prompt is split into blocks; None for full mode.
        limit: Maximum number of tokens to generate.
    """
    chosen = {
        "temperature": sampling.temperature or 0.0,
        "top_p": sampling.top_p and max(sampling.top_p, _LEAST_TOP_P),
        "top_k": sampling.top_k,
        "seed": _signed(sampling.seed),
        "stop": list(sampling.stop) or None,
        **{_RENAMED.get(name, name): value for name, value in sampling.extra.items()},
        **(sampling.grammar.asked if sampling.grammar else {}),
        "kv_transfer_params": plan and plan.to_dict(),
    }
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": limit,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def _signed(seed: int | None) -> int | None:
    """Convert a 64-bit seed to a signed integer, which vLLM requires."""
    return seed if seed is None or seed < 1 << 63 else seed - (1 << 64)


class ComingAnswer:
    """Decodes the tokens of a stream, emits their text, and builds the ``Generation``.

    Decoding here gives the same text as a local engine, and finds control tokens by their ids.

    Args:
        plan: How the prompt is split into blocks; None if there are none, or in full mode.
        sampling: Stop strings, and control tokens to keep.
    """

    def __init__(
        self,
        request: PendingAnswer,
        prompt: TokenPrompt,
        plan: BlockPlan | None,
        mode: Mode,
        tokenizer: Any,
        sampling: Sampling,
        recipe: RecipeOutline,
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._plan = plan
        self._mode = mode
        self._detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.keep_tokens)
        self._recipe = recipe
        self._clock = Clock(request.started)
        self._sent = time.perf_counter()
        self._ids: list[int] = []
        self._finish_reason: str | None = None
        self._params: Mapping[str, Any] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a token has arrived."""
        return bool(self._ids)

    def take(self, event: Any) -> None:
        """Process an event of the stream. Raises ProtocolError if it is malformed."""
        try:
            self._params = event.get("kv_transfer_params") or self._params
            for choice in event["choices"]:
                for token in choice.get("token_ids") or ():
                    self._push(token)
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
        except (AttributeError, KeyError, TypeError) as error:
            raise ProtocolError(
                f"found {shown(event)} in the server's answer, expected a chunk of a completion"
            ) from error

    def _push(self, token: int) -> None:
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            raise TypeError("a token id must be an integer from 0 to 2**31 - 1")
        self._clock.note_token()
        self._ids.append(token)
        self._emit(self._detokenizer.push(token))

    def _emit(self, text: str) -> None:
        since = len(self._detokenizer.text) - len(text)
        self._request.emit(text, self._detokenizer.marks(since))

    def complete(self) -> Generation:
        """Return the complete answer, after the stream has ended.

        Raises:
            ProtocolError: The answer has no token ids, or was not computed in the requested mode.
            ServingError: The server did not complete the answer.
        """
        self._emit(self._detokenizer.finish())
        reason = "stop" if self._detokenizer.stopped else self._finish_reason
        if reason is not None and not self._ids:
            raise ProtocolError("the server's answer has no token ids, which the request asked for")
        if reason not in get_args(FinishReason):
            raise ServingError(f"the server ended an answer early: finish_reason={shown(reason)}")
        ids = self._ids[: self._detokenizer.num_tokens]  # tokens may follow the stop string
        stats = self._clock.complete(self._stats(), len(ids))
        text, marks = self._detokenizer.text, self._detokenizer.marks()
        return Generation(text, ids, reason, stats, marks)  # type: ignore[arg-type]

    def _stats(self) -> ReuseStats:
        """Reuse as the server reports it."""
        prompt, plan, recipe = self._prompt, self._plan, self._recipe
        if plan is None:
            self._clock.assembling = self._clock.prefilling = self._sent
            name = "" if self._mode == "full" else str(recipe)
            return ReuseStats(self._mode, computed_tokens=len(prompt.ids), recipe=name)
        served = ServedBlocks.from_dict(self._params)
        counts = reuse_of(served, plan.lengths, len(prompt.ids))
        self._clock.assembling = self._clock.prefilling = self._sent + served.fetch_s
        return ReuseStats(
            "block",
            **counts,
            fetch_s=served.fetch_s,
            int8_blocks=served.int8_blocks,
            recipe=str(recipe),
        )
