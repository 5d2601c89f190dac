"""One answer, as its tokens come from a server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.pending import PendingAnswer
from blockattn_rag.engine.results import Clock, FinishReason, Generation, Mode, ReuseStats
from blockattn_rag.errors import ProtocolError, ServingError
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.server.client.request import TokenPrompt
from blockattn_rag.server.fields import shown
from blockattn_rag.server.protocol import ServedBlocks

_MOST_TOKENS = 1 << 31


class ComingAnswer:
    """Makes text of tokens, hands it on, and tells at the end what the answer reused.

    Text is made here and not taken from the server, so that it is what a local engine would write,
    and marks are known by their tokens.

    Args:
        request: whose answer it is.
        prompt: the request's.
        mode: in which it was asked for.
        tokenizer: a transformers tokenizer.
        sampling: how it is chosen: of it, the strings that end it, and the control tokens to keep.
        recipe: what the server runs block mode with.
    """

    def __init__(
        self,
        request: PendingAnswer,
        prompt: TokenPrompt,
        mode: Mode,
        tokenizer: Any,
        sampling: Sampling,
        recipe: str,
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._mode = mode
        self._detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.keep_tokens)
        self._recipe = "" if mode == "full" else recipe
        self._clock = Clock(request.started)
        self._sent = time.perf_counter()
        self._ids: list[int] = []
        self._finish_reason: str | None = None
        self._said: Mapping[str, Any] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a token has come."""
        return bool(self._ids)

    def take(self, event: Any) -> None:
        """Take an event of the stream.

        Raises:
            ProtocolError: it is not as vLLM writes them.
        """
        try:
            self._said = event.get("kv_transfer_params") or self._said
            for choice in event["choices"]:
                for token in choice.get("token_ids") or ():
                    self._push(token)
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
        except (AttributeError, KeyError, TypeError) as error:
            raise ProtocolError(
                f"found {shown(event)} in the server's answer, expected a piece of a completion"
            ) from error

    def _push(self, token: int) -> None:
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            raise TypeError("a token is a whole number, and no vocabulary has more")
        self._clock.note_token()
        self._ids.append(token)
        self._emit(self._detokenizer.push(token))

    def _emit(self, text: str) -> None:
        since = len(self._detokenizer.text) - len(text)
        self._request.emit(text, self._detokenizer.marks(since))

    def complete(self) -> Generation:
        """The whole answer, when the stream has ended.

        Raises:
            ProtocolError: it has no end, or was not computed in the mode that was asked for.
            ServingError: the server did not complete it.
        """
        self._emit(self._detokenizer.finish())
        reason = "stop" if self._detokenizer.stopped else self._finish_reason
        if reason is not None and not self._ids:
            raise ProtocolError("the server's answer holds no token ids, which were asked for")
        if reason not in get_args(FinishReason):
            raise ServingError(f"the server ended an answer early: finish_reason={shown(reason)}")
        ids = self._ids[: self._detokenizer.num_tokens]  # a token may come after the stop string
        stats = self._clock.complete(self._stats(), len(ids))
        text, marks = self._detokenizer.text, self._detokenizer.marks()
        return Generation(text, ids, reason, stats, marks)  # type: ignore[arg-type]

    def _stats(self) -> ReuseStats:
        """What was reused, as the server says."""
        prompt = self._prompt
        computed = len(prompt.final)
        if self._mode == "full" or not prompt.context:
            self._clock.assembling = self._clock.prefilling = self._sent
            total = computed + sum(prompt.lengths)
            return ReuseStats(self._mode, computed_tokens=total, recipe=self._recipe)
        served = ServedBlocks.from_dict(self._said)
        tokens = sum(prompt.lengths)
        if not served.cut_short:
            tokens = served.loaded_tokens + served.local_tokens
        if (served.blocks, tokens) != (len(prompt.lengths), sum(prompt.lengths)):
            raise ProtocolError(
                f"the server answered from {served.blocks} blocks of {tokens} tokens, asked for "
                f"{len(prompt.lengths)} of {sum(prompt.lengths)}"
            )
        if served.encoded > served.blocks or served.encoded_tokens > tokens:
            raise ProtocolError(
                f"the server says that {served.encoded} of {served.blocks} blocks were encoded, "
                f"{served.encoded_tokens} of {tokens} tokens"
            )
        self._clock.assembling = self._clock.prefilling = self._sent + served.fetch_s
        return replace(
            ReuseStats("block"),
            hits=served.blocks - served.encoded,
            misses=served.encoded,
            reused_tokens=tokens - served.encoded_tokens,
            computed_tokens=computed + served.encoded_tokens,
            fetch_s=served.fetch_s,
            int8_blocks=served.int8_blocks,
            recipe=self._recipe,
        )
