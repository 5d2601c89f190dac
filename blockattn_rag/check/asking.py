"""Requests that check a server: random prompts, and the log-probabilities of the first token."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockattn_rag.errors import ProtocolError
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import STORED, Keep
from blockattn_rag.server.client.http import background
from blockattn_rag.server.client.request import completion_body
from blockattn_rag.server.client.server import Server
from blockattn_rag.server.protocol import COMPLETIONS, BlockPlan, EncodeAnswer, EncodeBody
from blockattn_rag.server.served_blocks import ServedBlocks
from blockattn_rag.server.validation import shown

NEW_TOKENS = 8
LIKELIEST = 5
"""Number of log-probabilities to request for the first token. Servers may not allow many more."""

BLOCK_TOKENS = (24, 96, 16)
"""Lengths of a probe's context blocks. Together they fill a KV page of vLLM (16 tokens on a GPU,
128 on a CPU), because requests share only full pages."""
_FINAL_TOKENS = 12

_TOKEN = "token_id:"
_ASKED = {
    "logprobs": LIKELIEST,
    "return_tokens_as_token_ids": True,
    "min_tokens": NEW_TOKENS,
    "temperature": 0.0,
}


class Probe(NamedTuple):
    """A prompt: token ids of the context blocks and of the final block, and where each context
    block may be kept (``prompts.blocks.Keep``)."""

    blocks: list[list[int]]
    final: list[int]
    keep: tuple[Keep, ...]

    @classmethod
    def drawn(cls, tokenizer: Any, source: random.Random) -> Probe:
        """Draw a probe of random tokens that are not special tokens. All blocks may be stored."""
        others = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = [one for one in range(tokenizer.vocab_size) if one not in others]
        *blocks, final = (source.choices(ordinary, k=n) for n in (*BLOCK_TOKENS, _FINAL_TOKENS))
        return cls(blocks, final, (STORED,) * len(blocks))

    @property
    def ids(self) -> list[int]:
        """Token ids of the complete prompt."""
        return [*(token for ids in self.blocks for token in ids), *self.final]

    def cut(self, blocks: int) -> Probe:
        """The same tokens with only the first ``blocks`` blocks as context."""
        rest = (token for ids in self.blocks[blocks:] for token in ids)
        return Probe(self.blocks[:blocks], [*rest, *self.final], self.keep[:blocks])

    def turned(self) -> Probe:
        """The same blocks, in reverse order except for the first, which always opens the prompt."""
        keep = (*self.keep[:1], *self.keep[:0:-1])
        return Probe([self.blocks[0], *self.blocks[:0:-1]], self.final, keep)

    @property
    def stored(self) -> list[list[int]]:
        """The blocks that may be stored."""
        return [ids for ids, keep in zip(self.blocks, self.keep, strict=True) if keep.is_stored]


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer.

    Args:
        tokens: Token ids of the answer.
        likely: Log-probabilities of the likeliest first tokens, by token id.
        ttft_s: Seconds until the first token.
        served: Block counts that the server reported; all 0 in full mode.
    """

    tokens: tuple[int, ...]
    likely: Mapping[int, float]
    ttft_s: float
    served: ServedBlocks

    def distance(self, likely: Mapping[int, float]) -> float:
        """The largest difference to other log-probabilities. A token that one side does not list
        gets the lowest value in that side's list, so that the difference is never overstated."""
        here, there = min(self.likely.values()), min(likely.values())
        return max(
            abs(self.likely.get(token, here) - likely.get(token, there))
            for token in self.likely.keys() | likely.keys()
        )


class Asker:
    """Sends probes to a server. All methods raise ServingError if the server refuses or fails."""

    def __init__(self, server: Server) -> None:
        self._server = server
        info = server.info_now()
        self._name = server.model.name_at(info)

    def block(self, probe: Probe) -> Answer:
        """Request an answer in block mode.

        Raises:
            ProtocolError: the response does not report that all blocks were used.
        """
        lengths = tuple(len(ids) for ids in probe.blocks)
        plan = BlockPlan("complete", lengths, keep=probe.keep)
        answer = self._answer(COMPLETIONS, probe.ids, plan)
        answer.served.check_complete(lengths)
        return answer

    def full(
        self, ids: Sequence[int], salt: str | None = None, path: str = "/v1/completions"
    ) -> Answer:
        """Request an answer in full mode. Only requests with the same ``salt`` share KV pages."""
        return self._answer(path, ids, None, **({} if salt is None else {"cache_salt": salt}))

    def first(self, ids: Sequence[int], *, only_look: bool = False) -> EncodeAnswer:
        """Encode a block as a prompt's first block. With ``only_look``, only look it up."""
        body = EncodeBody((tuple(ids),), opens_prompt=True, only_look=only_look)
        return background.start(self._server.encode(body)).result()

    def _answer(self, path: str, ids: Sequence[int], plan: BlockPlan | None, **more: Any) -> Answer:
        body = completion_body(self._name, ids, plan, NEW_TOKENS, Sampling())
        ask = self._server.client.retried(lambda: self._asked(path, {**body, **_ASKED, **more}))
        return background.start(ask).result()

    async def _asked(self, path: str, body: dict[str, Any]) -> Answer:
        tokens: list[int] = []
        likely: dict[int, float] = {}
        told, ttft_s, began = None, 0.0, time.perf_counter()
        async with aclosing(self._server.client.events(path, body)) as events:
            async for event in events:
                try:
                    told = event.get("kv_transfer_params") or told
                    for choice in event["choices"]:
                        new = choice.get("token_ids") or ()
                        if new and not tokens:
                            ttft_s = time.perf_counter() - began
                            likely = _likely(choice["logprobs"]["top_logprobs"][0])
                        tokens += new
                except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                    raise ProtocolError(
                        f"Found {shown(event)} in the server's answer, expected a completion "
                        "chunk with token_ids and logprobs"
                    ) from error
        if not likely:
            raise ProtocolError("Found no token_ids in the server's answer, expected some")
        is_block = "kv_transfer_params" in body
        served = ServedBlocks.from_dict(told) if is_block else ServedBlocks(0, 0, 0)
        return Answer(tuple(tokens), likely, ttft_s, served)


def _likely(told: Mapping[str, Any]) -> dict[int, float]:
    return {int(token.removeprefix(_TOKEN)): float(value) for token, value in told.items()}
