"""Question sets that require one passage, two passages, or the order of passages.

All sets except Natural Questions are generated from the 40 articles in
``blockattn_rag/app/demo/data/facts``, which were not used to fit recipes. Sets are deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path

from facts import passages_for

from blockattn_rag.app.demo.facts import Article, FactQuestion, load
from blockattn_rag.lab.evaluation.datasets import read_samples
from blockattn_rag.lab.evaluation.metrics import contains_answer, f1_score, normalize_answer
from blockattn_rag.prompts.formats import Passage

_PASSAGES = 6


@dataclass(frozen=True, slots=True)
class Item:
    """A question about passages, and the strings that a correct answer contains.

    Args:
        id: Identifier that is unique within the set.
        set: Name of the set.
        needed: Groups of strings. A correct answer contains one string from each group.
        rival: The wrong option of a comparison. A correct answer names the correct option first.
        best: Index of the passage with the answer, or of the first one if two are needed.
    """

    id: str
    set: str
    question: str
    passages: tuple[Passage, ...]
    needed: tuple[tuple[str, ...], ...]
    best: int
    rival: str = ""

    def is_right(self, answer: str) -> bool:
        """Return whether an answer is correct, with the rules of ``lab.evaluation.metrics``."""
        if not all(contains_answer(answer, group) for group in self.needed):
            return False
        text = normalize_answer(answer)
        places = [text.find(normalize_answer(one)) for one in (self.needed[0][0], self.rival)]
        return not self.rival or places[1] == -1 or places[0] < places[1]

    def f1(self, answer: str) -> float:
        """Return the highest F1 of any accepted answer. If two answers are needed, they are
        joined."""
        if len(self.needed) == 1:
            return f1_score(answer, self.needed[0])
        return f1_score(answer, [" ".join(group[0] for group in self.needed)])


_DATES: dict[str, tuple[str, dict[str, tuple[str, int]]]] = {
    "bridges": (
        "Which of the two opened first: {a} or {b}?",
        {
            "golden-gate-bridge": ("the Golden Gate Bridge", 1937),
            "brooklyn-bridge": ("the Brooklyn Bridge", 1883),
            "sydney-harbour-bridge": ("the Sydney Harbour Bridge", 1932),
            "forth-bridge": ("the Forth Bridge", 1890),
            "millau-viaduct": ("the Millau Viaduct", 2004),
        },
    ),
    "space missions": (
        "Which of the two was launched first: {a} or {b}?",
        {
            "sputnik-1": ("Sputnik 1", 1957),
            "vostok-1": ("Vostok 1", 1961),
            "apollo-11": ("Apollo 11", 1969),
            "voyager-1": ("Voyager 1", 1977),
            "cassini-huygens": ("Cassini-Huygens", 1997),
        },
    ),
    "composers": (
        "Which of the two composers was born first: {a} or {b}?",
        {
            "mozart": ("Wolfgang Amadeus Mozart", 1756),
            "beethoven": ("Ludwig van Beethoven", 1770),
            "bach": ("Johann Sebastian Bach", 1685),
            "chopin": ("Frédéric Chopin", 1810),
        },
    ),
    "rivers": (
        "Which of the two rivers is longer: {a} or {b}?",
        {
            "nile": ("the Nile", -6650),
            "danube": ("the Danube", -2850),
            "mississippi": ("the Mississippi River", -3770),
            "rhine": ("the Rhine", -1230),
        },
    ),
    "explorers": (
        "Whose journey began first: that of {a} or that of {b}?",
        {
            "ferdinand-magellan": ("Ferdinand Magellan", 1519),
            "james-cook": ("James Cook", 1768),
            "roald-amundsen": ("Roald Amundsen", 1903),
            "marco-polo": ("Marco Polo", 1271),
        },
    ),
}
"""By cluster: a question, and for each article its subject and the number to compare (the smaller
one is the answer). All numbers are stated in the articles."""


def facts() -> list[Item]:
    """Return 90 questions, each of which is answered by one of six articles."""
    return [_item("facts", one, passages_for(one, seed=0)) for one in load().questions]


def comparisons() -> list[Item]:
    """Return questions that need two of six articles: which subject came first or is longer."""
    found = []
    for cluster, (question, subjects) in _DATES.items():
        for names in combinations(subjects, 2):
            draw = random.Random("/".join(names))
            (a, a_value), (b, b_value) = (subjects[one] for one in draw.sample(names, 2))
            right, wrong = (a, b) if a_value < b_value else (b, a)
            shown, best = _with_distractors(names, draw)
            found.append(
                Item(
                    f"{cluster}/{'/'.join(names)}",
                    "comparisons",
                    question.format(a=a, b=b),
                    shown,
                    ((right.removeprefix("the "),),),
                    best,
                    wrong.removeprefix("the "),
                )
            )
    return found


def pairs() -> list[Item]:
    """Return pairs of questions about two of six articles. A correct answer answers both."""
    articles = load().articles
    by_article = {one.article: one for one in load().questions}
    found = []
    for names in combinations(sorted(by_article), 2):
        if len({articles[name].cluster for name in names}) > 1:
            continue
        draw = random.Random(f"pair/{'/'.join(names)}")
        a, b = (by_article[one] for one in draw.sample(names, 2))
        shown, best = _with_distractors(names, draw)
        asked = f"Answer both questions. First: {a.question} Second: {b.question}"
        found.append(Item(f"{a.id}+{b.id}", "pairs", asked, shown, (a.answers, b.answers), best))
    return found


def order() -> list[Item]:
    """Return questions about the order of passages. In block mode, only positions encode it."""
    found = []
    for one in load().questions:
        shown = passages_for(one, seed=1)
        place = random.Random(f"order/{one.id}").randrange(len(shown) - 1)
        asked = (
            f"Which document comes directly after the one titled {shown[place][0]}? "
            "Answer with its title."
        )
        passages = tuple(Passage(*passage) for passage in shown)
        needed = ((shown[place + 1][0],),)
        found.append(Item(one.id, "order", asked, passages, needed, place + 1))
    return found


def natural_questions(path: Path, passages: int) -> list[Item]:
    """Return Natural Questions with Wikipedia passages, one of which has the answer."""
    found = []
    for one in (sample.with_passages(passages) for sample in read_samples(path)):
        best = next(place for place, passage in enumerate(one.passages) if passage.gold)
        shown = tuple(Passage(passage.title, passage.text) for passage in one.passages)
        found.append(Item(one.id, f"nq-{passages}", one.question, shown, (one.answers,), best))
    return found


def tuning(path: Path) -> list[Item]:
    """Return questions for choosing settings, which are not among the first 200 of ``mixed``.

    Two thirds are Natural Questions. No question occurs with both 5 and 10 passages.
    """
    others = [
        random.Random(0).sample(items, len(items))[_REPORTED:]
        for items in (order(), pairs(), facts())
    ]
    shuffled = [
        random.Random(0).sample(items, len(items))
        for items in (natural_questions(path, 5), natural_questions(path, 10))
    ]
    half = len(shuffled[0]) // 2
    turns = zip(shuffled[0][:half], shuffled[1][half:], mixed(others), strict=False)
    return [item for turn in turns for item in turn]


_REPORTED = 34
"""Number of questions from each set that are used for reported results."""


def mixed(sets: Iterable[Sequence[Item]]) -> list[Item]:
    """Alternate between sets, each in a fixed random order, so that any prefix is balanced."""
    drawn = [random.Random(0).sample(items, len(items)) for items in sets]
    return [item for turn in zip_longest(*drawn) for item in turn if item is not None]


def _item(name: str, one: FactQuestion, shown: Sequence[tuple[str, str]]) -> Item:
    title = load().articles[one.article].title
    best = next(place for place, passage in enumerate(shown) if passage[0] == title)
    passages = tuple(Passage(*passage) for passage in shown)
    return Item(one.id, name, one.question, passages, (one.answers,), best)


def _with_distractors(
    needed: Sequence[str], draw: random.Random
) -> tuple[tuple[Passage, ...], int]:
    """Return the needed articles with distractors from their cluster and from other clusters, in
    random order, and the index of the first needed article."""
    articles = load().articles
    cluster = articles[needed[0]].cluster
    others = sorted((a for a in articles.values() if a.id not in needed), key=lambda a: a.id)

    def drawn(accepts: Callable[[Article], bool], count: int) -> list[Article]:
        return draw.sample([article for article in others if accepts(article)], count)

    near = drawn(lambda one: one.cluster == cluster, 2)
    far = drawn(lambda one: one.cluster != cluster, _PASSAGES - len(needed) - len(near))
    shown = [*(articles[one] for one in needed), *near, *far]
    draw.shuffle(shown)
    best = next(place for place, article in enumerate(shown) if article.id == needed[0])
    return tuple(Passage(article.title, article.text) for article in shown), best
