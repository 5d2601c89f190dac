"""Content of the encyclopedia: entity types, their attributes, and sentences for each attribute.

Answers about all attributes have the same form, ``The {noun} of {name} is {value}.``, which repeats
the name: a tiny model learns to look up a name that it has just generated much earlier than to
answer with only the value. In passages, the name also precedes the value, because a causal model
can otherwise not associate the value with the name.
"""

# ruff: noqa: E501 - a table of sentences with one list per line, regardless of its length

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ValueKind = Literal["number", "place", "person"] | tuple[str, ...]

STONES = ("granite", "marble", "slate", "brick", "oak", "copper", "basalt", "sandstone")
PRODUCTS = ("lanterns", "clocks", "paper", "kites", "bells", "rope", "glass", "violins")
FISH = ("trout", "pike", "perch", "eel", "salmon", "carp", "bream", "char")
TRADES = ("baker", "painter", "sailor", "weaver", "surveyor", "gardener", "printer", "judge")


@dataclass(frozen=True, slots=True)
class Attribute:
    """Attribute of an entity type.

    ``named`` and ``pronoun`` are passage sentences with and without the entity's name;
    ``questions`` ask for the value; ``wins`` is the predicate for the winner of a comparison
    (``is taller``), and empty if values cannot be compared.
    """

    noun: str
    value: ValueKind
    named: tuple[str, ...]
    pronoun: tuple[str, ...]
    questions: tuple[str, ...]
    unit: str = ""
    wins: str = ""

    @property
    def comparable(self) -> bool:
        return bool(self.wins)

    def show(self, value: str) -> str:
        """Format the value with its unit, as in passages and answers: ``214 metres``."""
        return f"{value} {self.unit}" if self.unit else value

    def statement(self, name: str, shown: str) -> str:
        """Return the canonical answer sentence."""
        return f"The {self.noun} of {name} is {shown}."


@dataclass(frozen=True, slots=True)
class Kind:
    """Entity type: the pattern of its entities' names, and its attributes."""

    word: str
    name: str
    attributes: tuple[Attribute, ...]

    @property
    def comparables(self) -> tuple[Attribute, ...]:
        return tuple(a for a in self.attributes if a.comparable)


def _number(noun: str, unit: str, wins: str, *rest: tuple[str, ...]) -> Attribute:
    named, pronoun, questions = rest
    return Attribute(noun, "number", named, pronoun, questions, unit, wins)


_TOWER = (
    _number(
        "height",
        "metres",
        "is taller",
        (
            "{name} is {value} tall.",
            "The height of {name} is {value}.",
            "The roof of {name} is {value} up.",
        ),
        ("It is {value} tall.", "Its height is {value}."),
        ("What is the height of {name}?", "How tall is {name}?"),
    ),
    _number(
        "staircase",
        "steps",
        "has more steps",
        (
            "The staircase of {name} has {value}.",
            "{name} has {value}.",
            "Visitors of {name} climb {value}.",
        ),
        ("Its staircase has {value}.", "Visitors climb {value}."),
        ("How many steps does {name} have?", "How long is the staircase of {name}?"),
    ),
    Attribute(
        "city",
        "place",
        (
            "You find {name} in {value}.",
            "The city of {name} is {value}.",
            "{name} stands in {value}.",
        ),
        ("It stands in {value}.", "Its city is {value}."),
        ("In which city does {name} stand?", "Where does {name} stand?"),
    ),
    Attribute(
        "architect",
        "person",
        (
            "The architect of {name} was {value}.",
            "The plans of {name} are by {value}.",
            "{name} was designed by {value}.",
        ),
        ("Its architect was {value}.", "It was designed by {value}."),
        ("Who was the architect of {name}?", "Who designed {name}?"),
    ),
    Attribute(
        "material",
        STONES,
        ("The walls of {name} are made of {value}.", "{name} is built of {value}."),
        ("Its walls are made of {value}.", "It is built of {value}."),
        ("What is {name} built of?", "What is the material of {name}?"),
    ),
)
_COMPANY = (
    _number(
        "staff",
        "people",
        "has more people",
        (
            "{name} employs {value}.",
            "The staff of {name} counts {value}.",
            "The workshops of {name} employ {value}.",
        ),
        ("It employs {value}.", "Its staff counts {value}."),
        ("How many people does {name} employ?", "How large is the staff of {name}?"),
    ),
    _number(
        "revenue",
        "crowns",
        "earns more",
        (
            "{name} earns {value} a day.",
            "The revenue of {name} is {value}.",
            "Every day {name} earns {value}.",
        ),
        ("It earns {value} a day.", "Its revenue is {value}."),
        ("What is the revenue of {name}?", "How much does {name} earn?"),
    ),
    Attribute(
        "seat",
        "place",
        (
            "The seat of {name} is {value}.",
            "{name} is based in {value}.",
            "The house of {name} is in {value}.",
        ),
        ("Its seat is {value}.", "It is based in {value}."),
        ("Where is the seat of {name}?", "Where is {name} based?"),
    ),
    Attribute(
        "founder",
        "person",
        (
            "The founder of {name} was {value}.",
            "The work of {name} was begun by {value}.",
            "{name} was founded by {value}.",
        ),
        ("Its founder was {value}.", "It was founded by {value}."),
        ("Who was the founder of {name}?", "Who founded {name}?"),
    ),
    Attribute(
        "product",
        PRODUCTS,
        ("The product of {name} is {value}.", "{name} makes {value}."),
        ("Its product is {value}.", "It makes {value}."),
        ("What does {name} make?", "What is the product of {name}?"),
    ),
)
_FISH = Attribute(
    "fish",
    FISH,
    ("The fish of {name} is the {value}.", "{name} is known for its {value}."),
    ("Its fish is the {value}.", "It is known for its {value}."),
    ("What is the fish of {name}?", "Which fish is {name} known for?"),
)
_RIVER = (
    _number(
        "length",
        "kilometres",
        "is longer",
        (
            "{name} is {value} long.",
            "The length of {name} is {value}.",
            "In all {name} flows {value}.",
        ),
        ("It is {value} long.", "Its length is {value}."),
        ("What is the length of {name}?", "How long is {name}?"),
    ),
    _number(
        "width",
        "paces",
        "is wider",
        (
            "{name} is {value} wide.",
            "The width of {name} is {value}.",
            "The bed of {name} is {value} wide.",
        ),
        ("It is {value} wide.", "Its width is {value}."),
        ("What is the width of {name}?", "How wide is {name}?"),
    ),
    Attribute(
        "source",
        "place",
        (
            "The source of {name} lies near {value}.",
            "{name} rises near {value}.",
            "The spring of {name} is near {value}.",
        ),
        ("Its source lies near {value}.", "It rises near {value}."),
        ("Where is the source of {name}?", "Where does {name} rise?"),
    ),
    Attribute(
        "mouth",
        "place",
        ("The mouth of {name} is at {value}.", "{name} meets the sea at {value}."),
        ("Its mouth is at {value}.", "It meets the sea at {value}."),
        ("Where is the mouth of {name}?", "Where does {name} meet the sea?"),
    ),
    _FISH,
)
_LAKE = (
    _number(
        "area",
        "hectares",
        "is larger",
        (
            "{name} covers {value}.",
            "The area of {name} is {value}.",
            "The water of {name} covers {value}.",
        ),
        ("It covers {value}.", "Its area is {value}."),
        ("What is the area of {name}?", "How large is {name}?"),
    ),
    _number(
        "depth",
        "feet",
        "is deeper",
        (
            "{name} is {value} deep.",
            "The depth of {name} is {value}.",
            "The floor of {name} lies {value} down.",
        ),
        ("It is {value} deep.", "Its depth is {value}."),
        ("What is the depth of {name}?", "How deep is {name}?"),
    ),
    Attribute(
        "region",
        "place",
        (
            "The region of {name} is {value}.",
            "{name} lies in {value}.",
            "You find {name} in {value}.",
        ),
        ("Its region is {value}.", "It lies in {value}."),
        ("In which region does {name} lie?", "Where does {name} lie?"),
    ),
    Attribute(
        "discoverer",
        "person",
        (
            "The discoverer of {name} was {value}.",
            "The first to see {name} was {value}.",
            "{name} was discovered by {value}.",
        ),
        ("Its discoverer was {value}.", "It was discovered by {value}."),
        ("Who was the discoverer of {name}?", "Who discovered {name}?"),
    ),
    _FISH,
)
_PERSON = (
    _number("work", "poems", "wrote more",
            ("{name} wrote {value}.", "The work of {name} counts {value}.", "The book of {name} holds {value}."),
            ("The work counts {value}.", "The printed work is {value}."),
            ("How many poems did {name} write?", "How large is the work of {name}?")),
    _number("fortune", "coins", "was richer",
            ("{name} owned {value}.", "The fortune of {name} was {value}.", "The will of {name} speaks of {value}."),
            ("The fortune was {value}.", "The will speaks of {value}."),
            ("What was the fortune of {name}?", "How rich was {name}?")),
    Attribute("birthplace", "place",
              ("The birthplace of {name} is {value}.", "{name} was born in {value}.", "The family of {name} came from {value}."),
              ("The birthplace is {value}.", "The family came from {value}."),
              ("Where was {name} born?", "What is the birthplace of {name}?")),
    Attribute("teacher", "person",
              ("The teacher of {name} was {value}.", "The lessons of {name} were given by {value}.", "{name} was taught by {value}."),
              ("The teacher was {value}.", "The best teacher was {value}."),
              ("Who was the teacher of {name}?", "Who taught {name}?")),
    Attribute("trade", TRADES,
              ("By trade {name} was a {value}.", "{name} worked as a {value}."),
              ("The trade was that of a {value}.",),
              ("What was the trade of {name}?", "What did {name} work as?")),
)  # fmt: skip

KINDS = (
    Kind("tower", "{} Tower", _TOWER),
    Kind("company", "{} Company", _COMPANY),
    Kind("river", "{} River", _RIVER),
    Kind("lake", "Lake {}", _LAKE),
    Kind("person", "{} {}", _PERSON),
)
