"""Prompts for the comparison: passages and questions of the bundled model's task, as blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from blockattn_rag.app.demo.corpus import CorpusQuestion
from blockattn_rag.prompts.formats import Passage
from recipes.bundled_model.corpus import generate_samples
from recipes.bundled_model.formats import LANGCHAIN_CHAT, follow_up
from recipes.bundled_model.rows import ALIKE
from recipes.bundled_model.scenes import PRONOUNS, QuestionKind, turns_of, write_scene
from recipes.bundled_model.tokenizer import EOS

KINDS: dict[QuestionKind, int] = {"one-passage": 6, "order": 3}
"""Maximum number of questions per training prompt, by type. Comparisons are omitted, because they
are learned late."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of the head, the passages, and the final block including its answers.

    ``weights``: 1 for each answer token, and 0 for all other tokens of the final block.
    """

    blocks: list[list[int]]
    weights: list[float]


class PromptWriter:
    """Generates prompts in one chat format."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._bos: int = tokenizer.bos_token_id
        self._rng = rng

    def training(self, passages: tuple[int, int] = (2, 5), turns: int = 6) -> Prompt:
        """Generate passages about training entities, and up to ``turns`` questions of all types."""
        while True:
            count = self._rng.randint(*passages)
            kinds, again = self._rng.randint(1, 3), self._rng.randint(0, 1)
            scene = write_scene(self._rng, "train", count, again, kinds, PRONOUNS, ALIKE)
            pools = (turns_of(scene, self._rng, kind)[:most] for kind, most in KINDS.items())
            pool = [turn for some in pools for turn in some]
            if pool:
                asked = self._rng.sample(pool, min(turns, len(pool)))
                return self._prompt([article.passage for article in scene], asked)

    def question(self, sample: CorpusQuestion) -> Prompt:
        """Build a prompt from a sample: its passages and its question."""
        return self._prompt(sample.passages, [sample])

    def _prompt(self, passages: Sequence[Passage], asked: Sequence[CorpusQuestion]) -> Prompt:
        texts = [LANGCHAIN_CHAT.tail.format(question=asked[0].question)]
        texts += [follow_up(turn.question) for turn in asked[1:]]
        final: list[int] = []
        weights: list[float] = []
        for text, turn in zip(texts, asked, strict=True):
            for part, weight in ((text, 0.0), (turn.answer + EOS, 1.0)):
                ids = self._ids(part)
                final += ids
                weights += [weight] * len(ids)
        blocks = [self._ids(LANGCHAIN_CHAT.passage(passage, "{text}")) for passage in passages]
        return Prompt([[self._bos, *self._ids(LANGCHAIN_CHAT.head)], *blocks, final], weights)

    def _ids(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = False
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def held_out_prompts(
    tokenizer: PreTrainedTokenizerFast, kind: QuestionKind, passages: int, n: int, seed: int
) -> list[Prompt]:
    """Generate ``n`` prompts with questions about test entities, each with different passages."""
    writer = PromptWriter(tokenizer, random.Random(seed))
    return [writer.question(s) for s in generate_samples(seed, "test", kind, passages, n)]
