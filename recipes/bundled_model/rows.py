"""Training rows for the base model: token ids with loss weights.

There are five types. Four are short drills: *copy* rows teach the model to repeat earlier tokens,
*fact* rows to look up values of named entities, *article* rows to resolve pronouns, and *number*
rows to compare numbers. *Scene* rows are complete prompts with several questions about the same
passages. Each part of a prompt is tokenized separately, as in the engine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from blockattn_rag.app.demo.corpus import CorpusQuestion
from blockattn_rag.prompts.formats import Passage
from recipes.bundled_model.catalog import KINDS, Attribute
from recipes.bundled_model.formats import Format, draw_format, follow_up
from recipes.bundled_model.scenes import (
    PRONOUNS,
    Article,
    SceneWriter,
    comparison_answer,
    turns_of,
    write_scene,
)
from recipes.bundled_model.tokenizer import EOS, SPECIAL_TOKENS

#: Loss weight of passage tokens: low, because only recurring names can be predicted, not values.
PASSAGE_WEIGHT = 0.1

#: Share of words in names that share a syllable with another name. Without these, a model learns
#: to match names by one syllable, because that is nearly always sufficient.
ALIKE = 0.5


@dataclass(frozen=True, slots=True)
class Mix:
    """Composition of prompts.

    Args:
        lookups: Maximum number of questions about a single passage per prompt.
        editions: Share of prompts in which some entities have two passages.
        pronouns: Share of passages in which every second sentence uses a pronoun.
    """

    lookups: int = 8
    editions: float = 0.6
    pronouns: float = PRONOUNS


USUAL = Mix()


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of a training row; ``weights[i]`` is the loss weight for predicting ``ids[i]``."""

    ids: list[int]
    weights: list[float]


class RowWriter:
    """Generates rows of all types from one random generator."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        self._bos: int = tokenizer.bos_token_id

    def row(self, parts: list[tuple[str, float]]) -> Row:
        """Build a row from BOS and the parts, each tokenized separately, with a weight per part."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = False  # other code may have enabled it
        encoded = backend.encode_batch([text for text, _ in parts], add_special_tokens=False)
        ids, weights = [self._bos], [0.0]
        for encoding, (_, weight) in zip(encoded, parts, strict=True):
            ids += encoding.ids
            weights += [weight] * len(encoding.ids)
        return Row(ids, weights)

    def copy(self, length: int = 24, gap: int = 12) -> Row:
        """Generate a segment, up to ``gap`` other tokens, and the segment again, with loss."""

        def noise(n: int) -> list[int]:
            return self.rng.choices(range(len(SPECIAL_TOKENS), len(self.tokenizer)), k=n)

        segment, between = noise(length), noise(self.rng.randint(0, gap))
        ids = [*segment, *between, *segment]
        # The first repeated token has no loss, because the start of the repetition is random.
        return Row(ids, [0.0] * (len(ids) - length + 1) + [1.0] * (length - 1))

    def numbers(self, comparisons: int = 5, chains: int = 3) -> Row:
        """Generate comparisons ("214 is more than 187") and comparison answers without passages."""
        parts: list[tuple[str, float]] = []
        for _ in range(comparisons):
            x, y = self._pair()
            parts += [(f"{x} metres, {y} metres. ", 0.0)]
            parts += [(f"{x} is {'more' if x > y else 'less'} than {y}.\n", 1.0)]
        for _ in range(chains):
            kind = self.rng.choice(KINDS)
            attribute = self.rng.choice(kind.comparables)
            writer = self._scene_writer()
            a, b = writer.name(kind), writer.name(kind)
            x, y = self._pair()
            shown = attribute.show(str(x)), attribute.show(str(y))
            answer, _ = comparison_answer(attribute, a, b, *shown)
            split = answer.rindex(f" {x} is ")
            parts += [(answer[:split], PASSAGE_WEIGHT), (answer[split:] + EOS, 1.0), ("\n", 0.0)]
        return self.row(parts)

    def facts(self, entities: int = 5, again: float = 0.3) -> Row:
        """Generate facts about several entities, then a lookup of each fact.

        In a share ``again`` of the rows, half of the facts are stated again with another value,
        which replaces the first.
        """
        writer = self._scene_writer()
        told = self._entities(writer, entities, attributes=(1, 3))
        asked = [(attribute, name) for name, stated in told for attribute in stated]
        restated = self.rng.sample(asked, len(asked) // 2 if self.rng.random() < again else 0)
        holds: dict[tuple[Attribute, str], str] = {}
        sentences = []
        for attribute, name in self.rng.sample([*asked, *restated], len(asked) + len(restated)):
            shown = holds[attribute, name] = writer.value(attribute)
            plain = self.rng.random() < 0.5
            named = self.rng.choice(attribute.named).format(name=name, value=shown)
            sentences.append(attribute.statement(name, shown) if plain else named)
        return self._told_and_asked(sentences, self.rng.sample(asked, len(asked)), holds)

    def articles(self, entities: int = 5, questions: int = 10) -> Row:
        """Generate facts about several entities, then lookups, to teach the resolution of pronouns.

        The facts about an entity are consecutive, and every second uses a pronoun. In half of the
        rows, some entities are described again with other values, which replace the first ones.
        """
        writer = self._scene_writer()
        firsts = self._entities(writer, entities, attributes=(2, 4))
        most = len(firsts) // 2 + 1
        seconds = self.rng.sample(
            firsts, self.rng.randint(1, most) if self.rng.random() < 0.5 else 0
        )
        holds: dict[tuple[Attribute, str], str] = {}
        sentences = []
        for name, stated in self.rng.sample([*firsts, *seconds], len(firsts) + len(seconds)):
            for i, attribute in enumerate(self.rng.sample(stated, len(stated))):
                shown = holds[attribute, name] = writer.value(attribute)
                form = self.rng.choice(attribute.pronoun if i % 2 else attribute.named)
                sentences.append(form.format(name=name, value=shown))
        asked = self.rng.sample(list(holds), min(len(holds), questions))
        return self._told_and_asked(sentences, asked, holds)

    def _scene_writer(self) -> SceneWriter:
        """Create a writer for training entities in which no name is in use yet."""
        return SceneWriter(self.rng, "train", alike=ALIKE)

    def _entities(
        self, writer: SceneWriter, most: int, attributes: tuple[int, int]
    ) -> list[tuple[str, list[Attribute]]]:
        """Draw two to ``most`` new entities, with a number of attributes in the given range."""
        kinds = self.rng.sample(KINDS, self.rng.randint(1, 2))
        found = []
        for _ in range(self.rng.randint(2, most)):
            kind = self.rng.choice(kinds)
            name = writer.name(kind)
            found.append((name, self.rng.sample(kind.attributes, self.rng.randint(*attributes))))
        return found

    def _told_and_asked(
        self,
        sentences: Sequence[str],
        asked: Sequence[tuple[Attribute, str]],
        holds: Mapping[tuple[Attribute, str], str],
    ) -> Row:
        """Build a row of sentences and lookups of attributes by name, with loss on the values."""
        parts = [(f"Facts: {' '.join(sentences)}\n", 0.0)]
        for attribute, name in asked:
            shown = holds[attribute, name]
            head, _, end = attribute.statement(name, shown).rpartition(f" {shown}")
            parts += [(head, 0.0), (f" {shown}{end}", 1.0), ("\n", 0.0)]
        return self.row(parts)

    def _pair(self) -> tuple[int, int]:
        """Draw two different numbers, often close ones, which differ only in later digits."""
        x = self.rng.randint(100, 999)
        closeness = self.rng.random()
        y = x
        while y == x:
            if closeness < 0.3:
                y = x // 100 * 100 + self.rng.randint(0, 99)
            elif closeness < 0.45:
                y = x // 10 * 10 + self.rng.randint(0, 9)
            else:
                y = self.rng.randint(100, 999)
        return x, y

    def scene(
        self,
        passages: tuple[int, int],
        longest_frame: int | None = None,
        turns: int = 8,
        mix: Mix = USUAL,
    ) -> Row:
        """Generate a prompt in a random format, with up to ``turns`` questions about its passages.

        Args:
            passages: Minimum and maximum number of passages.
            longest_frame: Maximum number of characters around them. None: unlimited.
            turns: Maximum number of questions.
            mix: Composition of the scene and its questions.
        """
        scene, asked = self._draw(passages, turns, mix)
        prompt = draw_format(self.rng, longest_frame)
        parts = self._prompt(prompt, [a.passage for a in scene], asked[0].question)
        for i, turn in enumerate(asked):
            if i:
                parts.append((follow_up(turn.question), 0.0))
            parts.append((turn.answer + EOS, 1.0))
        return self.row(parts)

    def record(
        self,
        passages: tuple[int, int],
        turns: int = 8,
        mix: Mix = USUAL,
    ) -> dict[str, Any]:
        """Generate a prompt like :meth:`scene`, as a training record of blocks and turns."""
        scene, asked = self._draw(passages, turns, mix)
        prompt = draw_format(self.rng)
        view = self.rng.choice(prompt.views)
        template = {"before": prompt.before, "after": prompt.after}
        blocks = [{"text": prompt.text(article.passage, view), **template} for article in scene]
        prompts = [prompt.tail.format(question=asked[0].question)]
        prompts += [follow_up(turn.question) for turn in asked[1:]]
        return {
            "blocks": [{"text": prompt.head, "control": True}, *blocks],
            "turns": [
                {"prompt": text, "response": turn.answer}
                for text, turn in zip(prompts, asked, strict=True)
            ],
        }

    def _draw(
        self, passages: tuple[int, int], turns: int, mix: Mix
    ) -> tuple[list[Article], list[CorpusQuestion]]:
        """Draw a scene and at least one question about it."""
        while True:
            count = self.rng.randint(*passages)
            most = min(3, count // 2)
            second = self.rng.randint(1, most) if most and self.rng.random() < mix.editions else 0
            kinds = self.rng.randint(1, 3)
            scene = write_scene(self.rng, "train", count, second, kinds, mix.pronouns, ALIKE)
            if asked := list(self._questions(scene, turns, mix.lookups)):
                return scene, asked

    def sample(self, sample: CorpusQuestion) -> Row:
        """Convert a sample to a prompt in a random format, with loss only on the answer."""
        prompt = draw_format(self.rng)
        parts = self._prompt(prompt, sample.passages, sample.question)
        return self.row([*((text, 0.0) for text, _ in parts), (sample.answer + EOS, 1.0)])

    def _prompt(
        self, prompt: Format, passages: Sequence[Passage], question: str
    ) -> list[tuple[str, float]]:
        view = self.rng.choice(prompt.views)
        blocks = [(prompt.passage(passage, view), PASSAGE_WEIGHT) for passage in passages]
        return [(prompt.head, 0.0), *blocks, (prompt.tail.format(question=question), 0.0)]

    def _questions(
        self, scene: list[Article], limit: int, lookups: int
    ) -> Iterator[CorpusQuestion]:
        """Yield questions of all types in random order; no earlier answer reveals a later one."""
        pool = [
            *turns_of(scene, self.rng, "one-passage")[:lookups],
            *turns_of(scene, self.rng, "comparison")[:4],
            *turns_of(scene, self.rng, "order")[:6],
        ]
        self.rng.shuffle(pool)
        said: set[str] = set()
        for turn in pool:
            parts = re.split(r"\. |\([AB]\) ", turn.answer.removesuffix("."))
            sentences = [part for part in parts if part]
            if said.isdisjoint(sentences) and limit > 0:
                said.update(sentences)
                limit -= 1
                yield turn
