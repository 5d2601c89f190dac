"""``blockattn-rag repair``: create a recipe that improves a model's block-mode answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag import __version__
from blockattn_rag.app.cli.options import MODEL_HELP
from blockattn_rag.app.cli.output import count, duration, emit
from blockattn_rag.app.cli.progress import stages
from blockattn_rag.app.rag.names import existing_model

if TYPE_CHECKING:
    from blockattn_rag.app.rag.database import Database
    from blockattn_rag.engine.recipe import Recipe
    from blockattn_rag.lab.repair.data import Material
    from blockattn_rag.lab.repair.stages import Progress
    from blockattn_rag.model import BlockModel
    from blockattn_rag.prompts.formats import Passage

_EMBEDDING_SIZE = 1024
_EMBEDDED_AT_ONCE = 512
_LINE = '.jsonl or .jsonl.gz, one per line: {"title": "...", "text": "..."}'
_ENCODED_AT_ONCE = 64
RECIPE_FOLDER = "recipe"  # Duplicated, because importing store/directory.py would load torch.


def repair(
    db: Annotated[Path | None, typer.Option(help="Database folder, created by `ingest`.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"{MODEL_HELP} Default: the database's.", callback=existing_model),
    ] = None,
    passages: Annotated[
        Path | None,
        typer.Option(help=f"Passages to fit the recipe to, without a database: {_LINE}"),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='Real questions, .jsonl or .jsonl.gz, one per line: {"question": "..."}. Optional '
            'fields: "answers", a list of accepted answers; "passages", in the format of `eval`. '
            "Default: the model generates questions about the passages."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the recipe. Default: `recipe` in the folder of the database or of a "
            "local model; otherwise, NAME-recipe in the current folder."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time limit in minutes, including measurements.")
    ] = 20.0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Fraction of full mode's answers that the recipe must keep: right answers if "
            "there are enough, else tokens. The cheapest such recipe is chosen.",
        ),
    ] = 0.95,
) -> None:
    """Create a recipe that improves block-mode answers of a model without block fine-tuning.

    The recipe is fitted to the model's own full-mode answers, so no labels are needed. The cheapest
    recipe that keeps enough of these answers is measured on held-out questions and written to
    --output. `ask` finds it in the database's folder. After an interruption, run the command again.
    """
    started = time.monotonic()
    from blockattn_rag.lab.repair.report import figures
    from blockattn_rag.lab.repair.run import repair as run

    if db is not None and passages is not None:
        raise typer.BadParameter("Expected either --db or --passages, found both")
    if db is not None:
        job = _of_database(db, model, questions, output)
    elif model is not None and (passages or questions):
        job = _of_files(model, passages, questions, output)
    else:
        raise typer.BadParameter(
            "Expected --db FOLDER, or --model NAME with --passages FILE or with --questions FILE "
            "whose questions have passages"
        )
    with stages() as report:
        recipe = run(
            job.model,
            job.material,
            job.output,
            minutes=minutes,
            tolerance=tolerance,
            version=__version__,
            on_progress=report,
        )
        encoded = None
        if job.database is not None:
            job.database.use_own_recipe()
            encoded = _encode_passages(job, recipe, started + 60 * minutes, report)
    seconds = time.monotonic() - started
    data = {
        "recipe": str(recipe),
        "output": job.output,
        "digest": recipe.digest,
        "encoded_passages": None if encoded is None else encoded[0],
        "seconds": seconds,
        "report": recipe.report,
    }
    if encoded is None:
        use = f'Use it: recipe="{job.output}" (engine and adapters), --recipe {job.output}.'
    else:
        done, total = encoded
        later = "" if done == total else "; the others are encoded when they are first used"
        use = f"{done} of {count(total, 'passage')} re-encoded{later}. `{job.ask}` now uses it."
    first = f"Recipe {recipe} written to {job.output} in {duration(seconds)}."
    emit(data, first, *figures(recipe.report), use)


@dataclass(frozen=True, slots=True)
class _Job:
    """Inputs and output of a repair. ``database``: Database that will use the recipe, if any."""

    model: BlockModel
    material: Material
    output: Path
    database: Database | None = None
    ask: str = "ask"


def _of_database(db: Path, model: str | None, questions: Path | None, output: Path | None) -> _Job:
    from blockattn_rag.app.rag.database import Database
    from blockattn_rag.app.rag.passages import all_passages, prompt_maker, retriever
    from blockattn_rag.engine.find_recipe import recipe_in_use
    from blockattn_rag.lab.repair.data import Material, read_questions
    from blockattn_rag.lab.repair.plan import LIMITS
    from blockattn_rag.prompts.formats import Passage

    database = Database.open(db, model=model, recipe="none")
    engine, nearest = database.engine, retriever(database)
    database.require_passages()
    material = Material(
        prompt=prompt_maker(database),
        prompt_format="ask",
        passages=[Passage("", text) for text in all_passages(database.collection)],
        nearest=nearest,
        questions=read_questions(questions, nearest, LIMITS.passages) if questions else None,
        lender=engine.store,
        namespace=engine.access.namespace,
        in_use=recipe_in_use(engine.model, engine.store, db),
    )
    target = output or db / RECIPE_FOLDER
    is_used = target.resolve() == (db / RECIPE_FOLDER).resolve()
    ask = f"ask --model {model}" if model else "ask"
    return _Job(engine.model, material, target, database if is_used else None, ask)


def _of_files(
    model: str, passages: Path | None, questions: Path | None, output: Path | None
) -> _Job:
    from blockattn_rag.engine.find_recipe import recipe_in_use
    from blockattn_rag.lab.repair.data import Material, read_passages, read_questions
    from blockattn_rag.lab.repair.plan import LIMITS
    from blockattn_rag.model import BlockModel
    from blockattn_rag.prompts.checkpoints import AUTO_FORMAT, format_for
    from blockattn_rag.store import open_store

    read = [] if passages is None else read_passages(passages)
    nearest = _lexical(read) if read else None
    asked = read_questions(questions, nearest, LIMITS.passages) if questions else None
    # Packing is off, because training would repack the weights at every mode change.
    loaded = BlockModel.from_pretrained(model, pack_weights=False)
    form, tokenizer = format_for(AUTO_FORMAT, loaded.name), loaded.tokenizer.tokenizer
    material = Material(
        prompt=lambda question, shown: form.prompt(question, shown, tokenizer),
        prompt_format=form.name,
        passages=read,
        nearest=nearest,
        questions=asked,
        in_use=recipe_in_use(loaded, open_store(None)),
    )
    # `auto` searches a local model's folder for this subfolder.
    path = Path(model).expanduser()
    folder = path if path.is_dir() else path.parent
    beside = folder / RECIPE_FOLDER if path.exists() else Path(f"{path.name}-recipe")
    return _Job(loaded, material, output or beside)


def _lexical(passages: Sequence[Passage]) -> Callable[[str, int], list[Passage]]:
    """Return a retriever of the passages that share the most words with a text."""
    import numpy as np

    from blockattn_rag.adapters.hashed_embedding import hashed_vectors
    from blockattn_rag.app.rag.passages import text_of

    def embed(texts: Sequence[str]) -> Any:
        return np.array(hashed_vectors(texts, _EMBEDDING_SIZE), dtype=np.float32)

    texts = [text_of(passage) for passage in passages]
    parts = range(0, len(texts), _EMBEDDED_AT_ONCE)
    vectors = np.concatenate([embed(texts[start : start + _EMBEDDED_AT_ONCE]) for start in parts])

    def nearest(text: str, number: int) -> list[Passage]:
        (vector,) = embed([text])
        best = (-(vectors @ vector)).argsort(kind="stable")[:number]
        return [passages[index] for index in best]

    return nearest


def _encode_passages(job: _Job, recipe: Recipe, until: float, report: Progress) -> tuple[int, int]:
    """Encode a database's passages with a recipe, up to a time limit. Returns (encoded, total).
    Passages that are already stored with the recipe's sink and adapter are skipped."""
    from blockattn_rag.prompts.blocks import Block

    assert job.database is not None
    template = job.database.template
    blocks = [Block(passage.text, template) for passage in job.material.passages]
    done = 0
    for start in range(0, len(blocks), _ENCODED_AT_ONCE):
        if start and time.monotonic() > until:
            break
        report("re-encoding passages", done, len(blocks))
        part = blocks[start : start + _ENCODED_AT_ONCE]
        job.database.engine.precompute(part, recipe=recipe)
        done += len(part)
    report("re-encoding passages", done, len(blocks))
    return done, len(blocks)
