"""Compare the answers of a stock model in full mode, in block mode with recipes, and with only the
best passage.

    python benchmarks/quality run smollm2 --nq nq_rag.jsonl.gz
    python benchmarks/quality choose smollm2 --nq nq_rag_tune.jsonl.gz
    python benchmarks/quality diagnose smollm2 --nq nq_rag.jsonl.gz
    python benchmarks/quality tune smollm2 --nq nq_rag_tune.jsonl.gz --output tuned --lora
    python benchmarks/quality tuned smollm2 tuned --nq nq_rag.jsonl.gz --results other-folder
    python benchmarks/quality precision smollm2 --nq nq_rag.jsonl.gz
    python benchmarks/quality system-prompts smollm2 --nq nq_rag.jsonl.gz
    python benchmarks/quality table

``run`` answers questions from all sets in every row, and appends one line per answer to
``benchmarks/results/quality/MODEL.csv``. It stops after ``--minutes``, and adds missing answers
when it runs again. ``choose`` compares sinks and criteria for selecting the tokens to recompute, on
separate questions, in ``choices/MODEL.csv``. ``diagnose`` locates the causes of a recipe's
remaining divergence. ``tune`` fine-tunes a model on gold answers; ``tuned`` compares it with the
stock model and its recipe, in ``MODEL-tuned.csv``. ``precision`` compares block mode with keys and
values in int8 and in the model's data type, in ``precision/MODEL.csv``. ``system-prompts`` reuses
one collection under two system prompts, in ``systems/MODEL.csv``. ``table`` writes ``MODEL.md``
next to each CSV file, and the short tables in ``docs/quality.md`` to ``summary/MODEL.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))

import choices
import diagnosis
import finetuning
import sets
import system_prompts as systems
from choices import Choice, choices_table
from diagnosis import Change
from models import model_path
from precision import TYPES, answers, engines_of, precision_table
from records import measure, read
from rows import EARLIER, Answerer, Record
from system_prompts import ROWS, SystemRecord, system_table
from table import diagnosis_table, summary, tables

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.prompts.formats import PromptFormat

RESULTS = Path(__file__).parents[1] / "results" / "quality"
CHOICES = "choices"
DIAGNOSIS = "diagnosis"
PRECISION = "precision"
REPEATED = "repeated"
SUMMARY = "summary"
SYSTEMS = "systems"
_HELD_OUT = 24
"""Number of contexts for measuring the loss of a fine-tuned model."""
app = typer.Typer(help=__doc__, add_completion=False)


Model = Annotated[str, typer.Argument(help="smollm2, qwen, gemma, or another model.")]
Questions = Annotated[Path | None, typer.Option(help="File of Natural Questions.")]
RecipeFolder = Annotated[str, typer.Option(help="Recipe to measure: auto, or a recipe folder.")]
Minutes = Annotated[float, typer.Option(help="Minutes after which no question starts.")]


@app.command()
def run(
    model: Model,
    nq: Questions = None,
    recipe: RecipeFolder = "auto",
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 200,
    minutes: Minutes = 45,
    max_new_tokens: int = 40,
    dtype: str = "float32",
    row: Annotated[
        list[str] | None, typer.Option(help="Row to measure. Repeatable. Default: all.")
    ] = None,
    results: Path = RESULTS,
) -> None:
    """Answer questions in every row, or in some rows."""
    answerer = _answerer(model, recipe, max_new_tokens, dtype)
    if unknown := {*(row or ())} - {*answerer.rows}:
        raise SystemExit(f"Unknown rows {sorted(unknown)}: expected names from {answerer.rows}")
    name, rows = Path(model).name, row or answerer.rows
    path = results / f"{name}.csv"
    if dtype != "float32":
        path = results / REPEATED / f"{name}-{dtype}.csv"
    known = [*answerer.rows, *EARLIER]
    measure(path, Record, _items(nq)[:questions], answerer.answer, rows, minutes, known)


@app.command()
def tune(
    model: Model,
    nq: Annotated[
        list[Path], typer.Option(help="Natural Questions, not those of `run`. Repeatable.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the fine-tuned model.")],
    held_out: Annotated[
        Path | None, typer.Option(help="Natural Questions for the evaluation loss.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA, not all weights.")] = False,
    samples: Annotated[int, typer.Option(help="Number of training contexts.")] = 400,
) -> None:
    """Fine-tune a model on gold answers, in both modes. An interrupted run resumes."""
    if output.exists():
        raise SystemExit(f"{output} exists: delete it to train again")
    from blockattn_rag.lab.evaluation.datasets import read_samples

    files = [output.with_name(f"{output.name}-{name}.jsonl") for name in ("train", "held-out")]
    finetuning.write_samples([one for path in nq for one in read_samples(path)], files[0], samples)
    if held_out:
        finetuning.write_samples(read_samples(held_out), files[1], _HELD_OUT)
    finetuning.tune(model_path(model), files[0], files[1] if held_out else None, output, lora=lora)


@app.command()
def tuned(
    model: Model,
    folders: Annotated[
        list[Path], typer.Argument(help="Output folders of `tune`. Their names become rows.")
    ],
    nq: Questions = None,
    recipe: RecipeFolder = "auto",
    dtype: str = "float32",
    only: Annotated[
        list[str] | None, typer.Option(help="Question set to use. Repeatable. Default: all.")
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 200,
    minutes: Minutes = 45,
    max_new_tokens: int = 40,
    results: Path = RESULTS,
) -> None:
    """Answer questions with a model and its fine-tuned versions, in both modes."""
    items = _items(nq, only or ())[:questions]
    names = [*finetuning.STOCK_ROWS, *(folder.name for folder in folders)]
    if len({*names}) < len(names):
        raise SystemExit(f"Rows need distinct names, found {names}: rename a folder")
    stock, form = _stock(model, recipe, dtype)
    engines = {folder.name: _engine(str(folder), "auto", dtype) for folder in folders}
    answerer = finetuning.TunedAnswerer(stock, engines, form, max_new_tokens)
    path = results / f"{Path(model).name}-tuned.csv"
    measure(path, Record, items, answerer.answer, [*answerer.rows], minutes)


@app.command()
def diagnose(
    model: Model,
    nq: Questions = None,
    recipe: RecipeFolder = "auto",
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 48,
    minutes: Minutes = 45,
    max_new_tokens: int = 24,
    results: Path = RESULTS,
) -> None:
    """Replace parts of a recipe's keys and values with full mode's, and measure the effect."""
    answerer = _answerer(model, recipe, max_new_tokens)
    best = next(answerer.recipes[one] for one in ("recipe", "sink") if one in answerer.recipes)
    path = results / DIAGNOSIS / f"{Path(model).name}.csv"
    diagnosed = partial(diagnosis.diagnose, answerer, best)
    measure(path, Change, _items(nq)[:questions], diagnosed, diagnosis.CHANGES, minutes)


@app.command()
def choose(
    model: Model,
    nq: Annotated[Path, typer.Option(help="Natural Questions, not those of `run`.")],
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 120,
    minutes: Minutes = 45,
    max_new_tokens: int = 24,
    results: Path = RESULTS,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Candidate to measure. Repeatable. Default: all.")
    ] = None,
) -> None:
    """Compare sinks and criteria for selecting the tokens to recompute, by divergence."""
    engine, form = _stock(model)
    known = names = choices.names_for(engine.model)
    if candidate:
        if unknown := {*candidate} - {*names}:
            raise SystemExit(f"Unknown candidates {sorted(unknown)}: expected names from {names}")
        names = [choices.BLOCK, *candidate]
    compared = partial(choices.compare, engine, form, max_new_tokens)
    path = results / CHOICES / f"{Path(model).name}.csv"
    measure(path, Choice, sets.tuning(nq)[:questions], compared, names, minutes, known)


@app.command()
def precision(
    model: Model,
    nq: Questions = None,
    recipe: RecipeFolder = "auto",
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 200,
    minutes: Minutes = 20,
    max_new_tokens: int = 40,
    results: Path = RESULTS,
) -> None:
    """Answer questions in block mode, with keys and values in the model's dtype and in int8."""
    engine, form = _stock(model)
    items = [sets.facts(), *([sets.natural_questions(nq, 5)] if nq else [])]
    answered = partial(answers, engines_of(engine.model, recipe), form, max_new_tokens)
    path = results / PRECISION / f"{Path(model).name}.csv"
    measure(path, Record, sets.mixed(items)[:questions], answered, TYPES, minutes)


@app.command("system-prompts")
def system_prompts(
    model: Model,
    nq: Questions = None,
    recipe: RecipeFolder = "auto",
    dtype: str = "float32",
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 60,
    minutes: Minutes = 45,
    max_new_tokens: int = 40,
    results: Path = RESULTS,
) -> None:
    """Answer questions about one collection under two system prompts, in both modes."""
    engine, _ = _stock(model, recipe, dtype)
    answered = partial(systems.answers, engine, max_new_tokens)
    path = results / SYSTEMS / f"{Path(model).name}.csv"
    measure(path, SystemRecord, _items(nq)[:questions], answered, ROWS, minutes)


@app.command()
def table(results: Path = RESULTS) -> None:
    """Write tables of all records."""
    for path in sorted(results.glob("*.csv")):
        records = [*read(path, Record)]
        _write(path.with_suffix(".md"), tables(records))
        if not path.stem.endswith("-tuned"):
            repeated = [*read(results / REPEATED / path.name, Record)]
            _write(results / SUMMARY / f"{path.stem}.md", summary(records, repeated))
    for path in sorted((results / DIAGNOSIS).glob("*.csv")):
        records = [*read(results / path.name, Record)]
        _write(path.with_suffix(".md"), diagnosis_table([*read(path, Change)], records))
    for path in sorted((results / CHOICES).glob("*.csv")):
        _write(path.with_suffix(".md"), choices_table([*read(path, Choice)]))
    for path in sorted((results / PRECISION).glob("*.csv")):
        _write(path.with_suffix(".md"), precision_table([*read(path, Record)]))
    for path in sorted((results / SYSTEMS).glob("*.csv")):
        _write(path.with_suffix(".md"), system_table([*read(path, SystemRecord)]))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(path)


def _answerer(model: str, recipe: str, max_new_tokens: int, dtype: str = "float32") -> Answerer:
    from blockattn_rag.engine.find_recipe import resolve_recipe
    from blockattn_rag.engine.outline import FAST
    from blockattn_rag.engine.recipe import Recipe
    from blockattn_rag.prompts.sinks import HEAD

    engine, form = _stock(model, dtype=dtype)
    found = resolve_recipe(recipe, engine.model, engine.store)
    recipes = {
        "block": resolve_recipe("none", engine.model, engine.store),
        "sink": resolve_recipe(FAST, engine.model, engine.store),
    }
    if found.adapter is not None:
        recipes["recipe"] = replace(found, promote=0, recompute=0.0)
    last, best = [*recipes.items()][-1]
    recipes[f"{last}, 1 promoted"] = replace(best, promote=1)
    if engine.model.supports_relay:
        bases = {"head": Recipe(HEAD)} | ({last: best} if best.adapter else {})
        for base, one in bases.items():
            for percent in (5, 10, 15, 20):
                share = percent / 100
                recipes[f"{base}, {percent} % recomputed"] = replace(one, recompute=share)
    return Answerer(engine, form, recipes, max_new_tokens=max_new_tokens)


def _stock(
    model: str, recipe: str = "none", dtype: str = "float32"
) -> tuple[BlockAttentionEngine, PromptFormat]:
    """Return an engine, and the prompt format of its model."""
    from blockattn_rag.prompts.checkpoints import AUTO_FORMAT, format_for

    engine = _engine(model_path(model), recipe, dtype)
    return engine, format_for(AUTO_FORMAT, engine.model.name)


def _engine(model: str, recipe: str, dtype: str = "float32") -> BlockAttentionEngine:
    return BlockAttentionEngine.from_pretrained(model, store="memory:", dtype=dtype, recipe=recipe)


def _items(nq: Path | None, only: Sequence[str] = ()) -> list[sets.Item]:
    """Return questions that alternate between all sets, or between the sets named in ``only``."""
    found = [sets.facts(), sets.comparisons(), sets.pairs(), sets.order()]
    if nq is not None:
        found += [sets.natural_questions(nq, count) for count in (5, 10)]
    by_name = {items[0].set: items for items in found}
    if unknown := {*only} - by_name.keys():
        raise SystemExit(f"Unknown sets {sorted(unknown)}: expected names from {[*by_name]}")
    return sets.mixed(items for name, items in by_name.items() if not only or name in only)


if __name__ == "__main__":
    app()
