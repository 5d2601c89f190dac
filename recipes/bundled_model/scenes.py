"""Scenes of a fictional encyclopedia, and all questions about them.

A *scene* consists of the articles in a prompt (entity, facts and passage). There are three types
of questions:

- ``one-passage``: asks for a value that one passage states;
- ``comparison``: asks which of two entities of a type has the larger value (two passages);
- ``order``: asks for a value of an entity that two passages (*editions*) describe with different
  values. Their texts do not reveal which is newer; the later one in the prompt is valid.

This module needs only the standard library, and no model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from blockattn_rag.app.demo.corpus import CorpusQuestion
from blockattn_rag.prompts.formats import Passage
from recipes.bundled_model.catalog import KINDS, Attribute, Kind
from recipes.bundled_model.names import Split, alike_name, ending_of, pair_name

QuestionKind = Literal["one-passage", "comparison", "order"]
QUESTION_KINDS: tuple[QuestionKind, ...] = get_args(QuestionKind)

ORDER_QUESTIONS = (
    "What is the {noun} of {name} now?",
    "What is the current {noun} of {name}?",
    "What is the latest {noun} of {name}?",
)
#: Share of passages in which every second sentence uses a pronoun.
PRONOUNS = 0.3
WHICH_QUESTIONS = ("Which {wins}, {a} or {b}?", "Of {a} and {b}, which {wins}?")


@dataclass(frozen=True, slots=True)
class Article:
    """An entity with one edition of its passage, and the facts that the passage states."""

    kind: Kind
    name: str
    facts: Mapping[str, str]
    passage: Passage

    def states(self, attribute: Attribute) -> bool:
        """Return whether the passage states the attribute."""
        return attribute.noun in self.facts


class SceneWriter:
    """Writes articles for one split. Within a scene, each word names only one thing.

    ``pronouns`` is the share of passages in which every second sentence uses a pronoun. ``alike``
    is the share of words in names that deliberately share a syllable with an earlier name, such as
    ``Lubach Tower`` and ``Embach Tower``. With ``rhymes=False``, names of the same type have
    different endings, and so do first names of persons.
    """

    def __init__(
        self,
        rng: random.Random,
        split: Split,
        pronouns: float = PRONOUNS,
        alike: float = 0.0,
        rhymes: bool = True,
    ) -> None:
        self.rng = rng
        self.split: Split = split
        self.pronouns = pronouns
        self.alike = alike
        self._used: set[str] = set()
        self.rhymes = rhymes
        self._in_names: list[str] = []
        self._endings: set[tuple[str, int, str]] = set()

    def word(self, like: str | None = None) -> str:
        """Draw a word that is not used in this scene yet, with a syllable of ``like`` if set."""
        while True:
            word = (
                alike_name(self.rng, self.split, like) if like else pair_name(self.rng, self.split)
            )
            if word not in self._used:
                self._used.add(word)
                return word

    def name(self, kind: Kind) -> str:
        """Draw a name for a new entity, such as ``Halden Tower``."""
        words = [self._name_word(kind, i) for i in range(kind.name.count("{}"))]
        self._in_names += words
        return kind.name.format(*words)

    def _name_word(self, kind: Kind, place: int) -> str:
        """Draw a word of a name; if names must not rhyme, with a new ending at this position."""
        while True:
            word = self.word(self._alike_to())
            ending = (kind.word, place, ending_of(word))
            if self.rhymes or ending not in self._endings:
                self._endings.add(ending)
                return word

    def _alike_to(self) -> str | None:
        """Return an earlier word that the next one must resemble, or None for any word."""
        wanted = self.alike and self._in_names and self.rng.random() < self.alike
        return self.rng.choice(self._in_names) if wanted else None

    def value(self, attribute: Attribute) -> str:
        """Draw a formatted value, such as ``214 metres``, ``Morvale`` or ``slate``."""
        match attribute.value:
            case "number":
                return attribute.show(str(self.rng.randint(100, 999)))
            case "place":
                return self.word()
            case "person":
                return f"{self.word()} {self.word()}"
            case words:
                return self.rng.choice(words)

    def article(self, kind: Kind, name: str | None = None) -> Article:
        """Write an article about a new entity, or another edition about the entity ``name``.

        It states both comparable attributes, and one or two of the others.
        """
        name = name or self.name(kind)
        others = [a for a in kind.attributes if not a.comparable]
        stated = [*kind.comparables, *self.rng.sample(others, self.rng.choice((1, 2)))]
        self.rng.shuffle(stated)
        values = {a.noun: self.value(a) for a in stated}
        return Article(kind, name, values, Passage(name, self._text(name, stated, values)))

    def _text(self, name: str, stated: list[Attribute], values: Mapping[str, str]) -> str:
        """Write three or four sentences. Pronouns refer to the name in the previous sentence.

        The first sentence never begins with the name, so that names always follow a space and are
        always tokenized in the same way.
        """
        pronouns = self.rng.random() < self.pronouns
        sentences = []
        for i, attribute in enumerate(stated):
            forms = attribute.pronoun if pronouns and i % 2 else attribute.named
            forms = forms if i else tuple(f for f in forms if f[0] != "{")
            sentences.append(self.rng.choice(forms).format(name=name, value=values[attribute.noun]))
        return " ".join(sentences)


def write_scene(
    rng: random.Random,
    split: Split,
    num_passages: int,
    second_editions: int,
    kinds: int = 3,
    pronouns: float = PRONOUNS,
    alike: float = 0.0,
) -> list[Article]:
    """Write ``num_passages`` articles in prompt order, about entities of at most ``kinds`` types.
    ``second_editions`` of them describe an entity that another article also describes.
    ``pronouns`` and ``alike``: see :class:`SceneWriter`."""
    writer = SceneWriter(rng, split, pronouns, alike)
    chosen = rng.sample(KINDS, min(kinds, len(KINDS)))
    firsts = [
        # The first two have the same type, so that at least one comparison is possible.
        writer.article(chosen[0] if i < 2 else rng.choice(chosen))
        for i in range(num_passages - second_editions)
    ]
    again = rng.sample(firsts, second_editions)
    scene = [*firsts, *(writer.article(first.kind, first.name) for first in again)]
    rng.shuffle(scene)
    return scene


def _editions(scene: Sequence[Article]) -> dict[str, list[int]]:
    """Return the indices of each entity's articles, in prompt order."""
    found: dict[str, list[int]] = {}
    for i, article in enumerate(scene):
        found.setdefault(article.name, []).append(i)
    return found


def turns_of(
    scene: Sequence[Article], rng: random.Random, kind: QuestionKind
) -> list[CorpusQuestion]:
    """Return all questions of type ``kind`` that the scene answers, in random order."""
    groups = _editions(scene).values()
    single = [group[0] for group in groups if len(group) == 1]
    if kind == "one-passage":
        turns = [
            _lookup(scene, rng, i, attribute)
            for i in single
            for attribute in scene[i].kind.attributes
            if scene[i].states(attribute)
        ]
    elif kind == "comparison":
        turns = [
            _comparison(scene, rng, (i, j), attribute)
            for i in single
            for j in single
            if i != j and scene[i].kind is scene[j].kind
            for attribute in scene[i].kind.comparables
            if scene[i].facts[attribute.noun] != scene[j].facts[attribute.noun]
        ]
    else:
        turns = [
            _order(scene, rng, (i, j), attribute)
            for i, j in (group for group in groups if len(group) == 2)
            for attribute in scene[i].kind.attributes
            if scene[i].states(attribute)
            and scene[j].states(attribute)
            and scene[i].facts[attribute.noun] != scene[j].facts[attribute.noun]
        ]
    rng.shuffle(turns)
    return turns


def _lookup(scene: Sequence[Article], rng: random.Random, i: int, of: Attribute) -> CorpusQuestion:
    article, shown = scene[i], scene[i].facts[of.noun]
    question = rng.choice(of.questions).format(name=article.name)
    return CorpusQuestion("one-passage", question, of.statement(article.name, shown), shown, (i,))


def _order(
    scene: Sequence[Article], rng: random.Random, pair: tuple[int, int], of: Attribute
) -> CorpusQuestion:
    last = scene[max(pair)]
    shown = last.facts[of.noun]
    question = rng.choice(ORDER_QUESTIONS).format(noun=of.noun, name=last.name)
    return CorpusQuestion("order", question, of.statement(last.name, shown), shown, pair)


def _comparison(
    scene: Sequence[Article], rng: random.Random, pair: tuple[int, int], of: Attribute
) -> CorpusQuestion:
    a, b = (scene[i] for i in pair)
    question = rng.choice(WHICH_QUESTIONS).format(wins=of.wins, a=a.name, b=b.name)
    answer, verdict = comparison_answer(of, a.name, b.name, a.facts[of.noun], b.facts[of.noun])
    return CorpusQuestion("comparison", question, answer, verdict, pair)


def comparison_answer(of: Attribute, a: str, b: str, shown_a: str, shown_b: str) -> tuple[str, str]:
    """Return the answer as a short chain (both values, their comparison, the winner), and its end.

    Comparing two numbers that were just generated is much easier than naming the winner directly
    from the passages. The letters turn naming the winner into a lookup: the model learns very
    late to name it by its position, first or second.
    """
    x, y = (int(shown.split()[0]) for shown in (shown_a, shown_b))
    verdict = f"{a if x > y else b} {of.wins}"
    statements = f"(A) {of.statement(a, shown_a)} (B) {of.statement(b, shown_b)}"
    compared = f"{x} is {'more' if x > y else 'less'} than {y}, so ({'A' if x > y else 'B'})"
    return f"{statements} {compared} {verdict}.", verdict
