"""Check that answers match their schema, and measure the overhead of a schema.

    python benchmarks/structured_output.py --model smollm2 --prompts 500

The model answers the demo's questions in block mode, cycling through 20 JSON schemas. The package
`jsonschema` validates each answer, including formats. The script measures the compile time of each
schema and the time per token to apply it, and prints a table. An interrupted run resumes from the
answers in --output.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

import typer
from jsonschema import Draft202012Validator
from tables import markdown  # the script next to this one

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.model.constraint import GrammarConstraint
from blockattn_rag.output.compiler import GrammarCompiler
from blockattn_rag.prompts.formats import CHAT, Passage

_HEAD = ("schema", "answers", "parse", "fit", "cut", "tokens", "compiling", "first token",
         "further tokens", "share of a token's time")  # fmt: skip
DATA = Path(__file__).parents[1] / "blockattn_rag" / "app" / "demo" / "data"
TEXT = {"type": "string", "maxLength": 24}
NULLABLE = {"type": ["null", "number"], "minimum": 0, "maximum": 99, "multipleOf": 0.5}
COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
OPERAND = {"anyOf": [COUNT, {"$ref": "#/$defs/sum"}]}


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object."""
    names = {"required": list(properties)} if required else {}
    return {"type": "object", "properties": properties, **names}


def several(items: dict[str, Any], most: int = 3, least: int = 0) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def case(kind: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a case in a union."""
    return record(kind={"const": kind}, **properties)


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": record(name=TEXT, metres=COUNT, known={"type": "boolean"}),
    "nested": record(place=record(name=TEXT, at=record(x=COUNT, y=COUNT)), note=TEXT),
    "deep": record(a=record(b=record(c=record(d=record(e=record(f=COUNT)))))),
    "optional": record(False, name=TEXT, metres=COUNT, feet=COUNT),
    "nullable": record(name={"anyOf": [TEXT, {"type": "null"}]}, metres=NULLABLE),
    "enum": record(
        kind={"enum": ["tower", "lake", "river", "company"]}, sure={"enum": [1, 2, 3, None]}
    ),
    "long enum": record(code={"enum": [f"code-{number:04d}" for number in range(1000)]}),
    "unicode": record(höhe=COUNT, 名前={"enum": ["塔", "湖"]}, émoji={"enum": ["🏰", "🌊"]}),
    "array": several(TEXT, most=4, least=1),
    "records": record(items=several(record(name=TEXT, metres=COUNT), least=1)),
    "matrix": several(several({"type": "integer", "minimum": -9, "maximum": 9}, 3, 3), 3, 3),
    "tuple": {
        "type": "array",
        "prefixItems": [COUNT, TEXT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "union": {"anyOf": [record(metres=COUNT), record(feet=COUNT, inches=COUNT), TEXT]},
    "cases": {
        "oneOf": [case("tower", metres=COUNT), case("lake", area=COUNT), case("river", source=TEXT)]
    },
    "patterns": record(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        hex={"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    ),
    "formats": record(
        day={"type": "string", "format": "date"},
        key={"type": "string", "format": "uuid"},
        time={"type": "string", "format": "time", "maxLength": 20},
    ),
    "numbers": record(
        share={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
        tens={"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 500},
    ),
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,9}$": COUNT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "all of": {"allOf": [record(name=TEXT), record(metres=COUNT)], "maxProperties": 2},
    "recursive": {
        "$defs": {"sum": record(left=OPERAND, right=OPERAND)},
        "$ref": "#/$defs/sum",
    },
}


class Timed:
    """Wrapper that records the seconds of each call of a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds: list[float] = []
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                self.seconds.append(time.perf_counter() - began)

        setattr(owner, name, timed)

    def taken(self) -> list[float]:
        """Return the seconds recorded since the last call of ``taken``."""
        seconds, self.seconds = self.seconds, []
        return seconds


def main(
    model: str = "smollm2",
    prompts: int = 500,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    output: Path | None = None,
) -> None:
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    compiling, holding = Timed(GrammarCompiler, "_compile"), Timed(GrammarConstraint, "__call__")
    store = MemoryStore(1 << 30)
    engine = BlockAttentionEngine.from_pretrained(model, store=store, resident_bytes=0)
    files = sorted(DATA.glob("t*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    lines = output.read_text("utf-8").splitlines() if output and output.exists() else []
    rows = [json.loads(line) for line in lines]
    for number in range(len(rows), prompts):
        name = list(SCHEMAS)[number % len(SCHEMAS)]
        schema = SCHEMAS[name]
        asked = records[number * 7 % len(records)]
        passages = [Passage(one["title"], one["text"]) for one in asked["passages"]]
        prompt = CHAT.prompt(asked["question"], passages, engine.model.tokenizer.tokenizer)
        answer = engine.generate(
            prompt,
            structured_outputs={"json": schema},
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=number,
        )
        first, *later = holding.taken()
        row = {
            "schema": name,
            "text": answer.text,
            "compile_s": next(iter(compiling.taken()), None),
            "first_s": first,
            "later_s": later,
            "tokens": len(answer.token_ids),
            "total_s": answer.stats.total_s,
            "ttft_s": answer.stats.ttft_s,
            "parses": False,
            "fits": False,
            "cut": answer.finish_reason == "length",
        }
        with suppress(IncompleteAnswerError):  # Truncated answers are counted in the table.
            value = answer.json()
            checker = Draft202012Validator.FORMAT_CHECKER
            row["parses"] = True
            row["fits"] = Draft202012Validator(schema, format_checker=checker).is_valid(value)
        rows.append(row)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(table(model, rows))


def table(model: str, rows: list[dict[str, Any]]) -> str:
    """Format the results of each schema and the totals as a Markdown table, in milliseconds."""
    lines = []
    for name in [*SCHEMAS, "all"]:
        of = [row for row in rows if name in ("all", row["schema"])]
        if not of:
            continue
        compiled = [row["compile_s"] for row in of if row["compile_s"] is not None]
        later = [one for row in of for one in row["later_s"]] or [0.0]
        decoding = sum(row["total_s"] - row["ttft_s"] for row in of)
        count = {key: sum(row[key] for row in of) for key in ("parses", "fits", "cut")}
        lines.append(
            (
                *(name, len(of), count["parses"], count["fits"], count["cut"]),
                f"{mean(row['tokens'] for row in of):.0f}",
                f"{1e3 * median(compiled or [0]):.1f}",
                f"{1e3 * median(row['first_s'] for row in of):.2f}",
                f"{1e3 * median(later):.2f}",
                f"{100 * sum(later) / max(decoding, 1e-9):.1f} %",
            )
        )
    title = f"{model}: {len(rows)} prompts, {len(SCHEMAS)} schemas; times in milliseconds"
    return f"{title}\n\n{markdown(_HEAD, lines)}"


if __name__ == "__main__":
    typer.run(main)
