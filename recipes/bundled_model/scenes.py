"""Scenes of a fictional encyclopedia: what one prompt holds, and every question about it.

A *scene* is what one prompt holds: articles (an entity, what its passage states, the passage).
Three kinds of question are asked of a scene:

- ``one-passage``: a value that one passage states;
- ``comparison``: which of two entities of one kind has more of something (two passages);
- ``order``: two passages, two *editions*, describe one entity with different values and
  nothing in their texts tells which is newer. The later one in the prompt holds.

Pure standard library: nothing here needs a model.
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
#: Share of passages that tell every second sentence with a pronoun.
PRONOUNS = 0.3
WHICH_QUESTIONS = ("Which {wins}, {a} or {b}?", "Of {a} and {b}, which {wins}?")


@dataclass(frozen=True, slots=True)
class Article:
    """An entity and one edition of its passage, with the facts that the passage states."""

    kind: Kind
    name: str
    facts: Mapping[str, str]
    passage: Passage

    def states(self, attribute: Attribute) -> bool:
        """Whether the passage states the attribute."""
        return attribute.noun in self.facts


class SceneWriter:
    """Writes articles of one split; a word names at most one thing in a scene.

    ``pronouns`` is the share of passages that tell every second sentence with a pronoun,
    ``alike`` the share of words in names that have a syllable in common with an earlier name on
    purpose: ``Lubach Tower`` beside ``Embach Tower``. With ``rhymes=False``, no two names of one
    kind, nor two first names of persons, end alike.
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
        """A word that this scene does not use yet, with a syllable of ``like`` if given."""
        while True:
            word = (
                alike_name(self.rng, self.split, like) if like else pair_name(self.rng, self.split)
            )
            if word not in self._used:
                self._used.add(word)
                return word

    def name(self, kind: Kind) -> str:
        """A name for a new entity, such as ``Halden Tower``."""
        words = [self._name_word(kind, i) for i in range(kind.name.count("{}"))]
        self._in_names += words
        return kind.name.format(*words)

    def _name_word(self, kind: Kind, place: int) -> str:
        """The word at one place of a name; if names must not rhyme, of a new ending there."""
        while True:
            word = self.word(self._alike_to())
            ending = (kind.word, place, ending_of(word))
            if self.rhymes or ending not in self._endings:
                self._endings.add(ending)
                return word

    def _alike_to(self) -> str | None:
        """The earlier name's word that the next one is to be like; None for any word."""
        wanted = self.alike and self._in_names and self.rng.random() < self.alike
        return self.rng.choice(self._in_names) if wanted else None

    def value(self, attribute: Attribute) -> str:
        """A fresh value of the attribute, as shown: ``214 metres``, ``Morvale``, ``slate``."""
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
        """An article on a new entity, or another edition on the entity ``name``.

        Both comparable attributes are always stated, with one or two of the others.
        """
        name = name or self.name(kind)
        others = [a for a in kind.attributes if not a.comparable]
        stated = [*kind.comparables, *self.rng.sample(others, self.rng.choice((1, 2)))]
        self.rng.shuffle(stated)
        values = {a.noun: self.value(a) for a in stated}
        return Article(kind, name, values, Passage(name, self._text(name, stated, values)))

    def _text(self, name: str, stated: list[Attribute], values: Mapping[str, str]) -> str:
        """Three or four sentences; a pronoun stands for the name in the sentence before.

        The first sentence never begins with the name: a name is then always written after
        a space, and the tokenizer cuts it in one way only.
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
    """``num_passages`` articles in prompt order, ``second_editions`` of them on an entity
    that another article describes too, on entities of at most ``kinds`` kinds; ``pronouns`` and
    ``alike`` as in :class:`SceneWriter`."""
    writer = SceneWriter(rng, split, pronouns, alike)
    chosen = rng.sample(KINDS, min(kinds, len(KINDS)))
    firsts = [
        # The first two are of one kind, so that there is always something to compare.
        writer.article(chosen[0] if i < 2 else rng.choice(chosen))
        for i in range(num_passages - second_editions)
    ]
    again = rng.sample(firsts, second_editions)
    scene = [*firsts, *(writer.article(first.kind, first.name) for first in again)]
    rng.shuffle(scene)
    return scene


def _editions(scene: Sequence[Article]) -> dict[str, list[int]]:
    """The positions of each entity's articles, in prompt order."""
    found: dict[str, list[int]] = {}
    for i, article in enumerate(scene):
        found.setdefault(article.name, []).append(i)
    return found


def turns_of(
    scene: Sequence[Article], rng: random.Random, kind: QuestionKind
) -> list[CorpusQuestion]:
    """Every question of ``kind`` that the scene answers, in random order."""
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
    """The answer as a short chain (both values, the numbers compared, the winner), and its end.

    One comparison of two numbers that were just written is a far smaller step than naming
    the winner straight from the passages. The letters make the winner one of two words to look
    up: to tell it by its place alone, first or second, is learned very late.
    """
    x, y = (int(shown.split()[0]) for shown in (shown_a, shown_b))
    verdict = f"{a if x > y else b} {of.wins}"
    statements = f"(A) {of.statement(a, shown_a)} (B) {of.statement(b, shown_b)}"
    compared = f"{x} is {'more' if x > y else 'less'} than {y}, so ({'A' if x > y else 'B'})"
    return f"{statements} {compared} {verdict}.", verdict
