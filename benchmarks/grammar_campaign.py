"""Check that large grammars either constrain every answer or are rejected.

    python benchmarks/grammar_campaign.py --grammars 200 --seconds 300

The bundled model answers with small and large random grammars of four types (choice, anyOf,
required tools, optional properties), in block and full mode, as single requests, streams and
batches. The script counts valid answers, truncated but valid objects, rejections with their
reasons, and wrong answers. The exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import typer
from jsonschema import Draft202012Validator

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.engine.results import Generation
from blockattn_rag.errors import GrammarError
from blockattn_rag.output.tool_formats import FORMATS, calls_grammar

PROMPTS = [
    ["The height of Halden Tower is 214 metres.", "What is the height of Halden Tower?"],
    ["Elven Tower is in Orsta.", "It has 222 steps.", "Where is Elven Tower?"],
]
SIZES = {
    "choice": [2, 40, 1_000, 2_000, 5_000, 20_000, 60_000, 200_000],
    "anyOf": [2, 40, 1_000, 2_100, 4_000, 12_000],
    "tools": [1, 40, 1_000, 2_010, 4_000, 12_000],
    "optional": [2, 40, 400, 990, 1_800, 2_500, 20_000],
}
MAX_NEW_TOKENS = 64
Judge = Callable[[str], bool]  # Function that returns whether an answer is valid.


def word(draw: random.Random) -> str:
    """Return a random name."""
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9)))


def choice(draw: random.Random, size: int) -> tuple[dict[str, Any], Judge]:
    """Return a choice of strings, some of which share a prefix, and its validator."""
    start = draw.choice(["", "Street ", "The lake of "])
    texts = [f"{start}{word(draw)} {number}" for number in range(size)]
    return {"choice": texts}, set(texts).__contains__


def record(draw: random.Random, number: int) -> dict[str, Any]:
    """Return the schema of an ``anyOf`` case."""
    properties = {"kind": {"const": f"{word(draw)}{number}"}, "n": {"enum": [1, 2, 3]}}
    return {"type": "object", "properties": properties, "required": ["kind", "n"]}


def by_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], Judge]:
    """Return the options for a JSON schema, and its validator."""
    validator = Draft202012Validator(schema)

    def fits(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return {"json": schema}, fits


def any_of(draw: random.Random, size: int) -> tuple[dict[str, Any], Judge]:
    """Return a union of objects, and its validator."""
    return by_schema({"anyOf": [record(draw, number) for number in range(size)]})


def optional(draw: random.Random, size: int) -> tuple[dict[str, Any], Judge]:
    """Return an object that has only optional properties, and its validator."""
    names = [f"{word(draw)}{number}" for number in range(size)]
    properties = {name: {"enum": [number]} for number, name in enumerate(names)}
    return by_schema({"type": "object", "properties": properties, "additionalProperties": False})


def tools(draw: random.Random, size: int) -> tuple[dict[str, Any], Judge]:
    """Return a required call of one of several tools, and its validator."""
    names = [f"{word(draw)}_{number}" for number in range(size)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    form = FORMATS[draw.choice(["hermes", "llama3"])]
    call = re.compile(r'(?:<tool_call>\n)?\{"name": "(\w+)", "\w+": \{\}\}(?:\n</tool_call>)?')

    def is_call(text: str) -> bool:
        found = call.fullmatch(text)
        return found is not None and found[1] in names

    return {"grammar": calls_grammar(form, tools, None, several=False)}, is_call


KINDS = {"choice": choice, "anyOf": any_of, "tools": tools, "optional": optional}


def answers(engine: BlockAttentionEngine, mode: str, options: Any) -> Iterator[Generation]:
    """Yield the answers of a single request, a stream and a batch."""
    yield engine.generate(PROMPTS[0], mode=mode, **options)
    *_, last = engine.stream(PROMPTS[1], mode=mode, **options)
    assert last.generation is not None
    yield last.generation
    yield from engine.generate_batch(PROMPTS, mode=mode, **options)


def main(grammars: int = 200, seconds: float = 300.0, seed: int = 0) -> None:
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    engine = BlockAttentionEngine.from_pretrained("bundled", store=MemoryStore(1 << 30))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    draw, began = random.Random(seed), time.perf_counter()
    for number in range(grammars):
        if time.perf_counter() - began > seconds:
            break
        kind = list(KINDS)[number % len(KINDS)]
        asked, fits = KINDS[kind](draw, draw.choice(SIZES[kind]))
        sampling = {"temperature": 1.0, "seed": number} if draw.random() < 0.5 else {}
        options = {"structured_outputs": asked, "max_new_tokens": MAX_NEW_TOKENS, **sampling}
        counts[kind]["grammars"] += 1
        for mode in ("block", "full"):
            try:
                for answer in answers(engine, mode, options):
                    is_cut = answer.finish_reason == "length" and kind == "optional"
                    text = answer.text.rpartition(",")[0] + "}" if is_cut else answer.text
                    found = "WRONG" if not fits(text) else "cut" if is_cut else "match"
                    counts[kind][found] += 1
                    if found == "WRONG":
                        print(f"WRONG: {kind}, {mode}: {answer.text!r}")
            except GrammarError as error:
                counts[kind]["refused"] += 1
                reasons[re.sub(r"\d[\d,]*", "N", str(error))[-160:]] += 1
    columns = ("grammars", "match", "cut", "refused", "WRONG")
    print("\n| kind | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for kind, found in counts.items():
        print(f"| {kind} | " + " | ".join(str(found[name]) for name in columns) + " |")
    print("\n".join(f"refused {n} times: ...{reason}" for reason, n in reasons.most_common()))
    raise typer.Exit(int(any(found["WRONG"] for found in counts.values())))


if __name__ == "__main__":
    typer.run(main)
