"""``blockattn-rag calibrate``: settings of block mode for a model and a database, certified."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockattn_rag import __version__
from blockattn_rag.cli.certificates import show_calibration
from blockattn_rag.cli.figures import count
from blockattn_rag.cli.files import writable
from blockattn_rag.cli.output import (
    JsonOption,
    ModelArgument,
    note,
    stages,
    working,
)
from blockattn_rag.errors import DataError
from blockattn_rag.files.jsonl import numbered_lines, parse_line
from blockattn_rag.files.records import of_kind, text_of
from blockattn_rag.rag.database import Database
from blockattn_rag.rag.model_names import existing_model

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.evaluation.calibration.pairs import Pair
    from blockattn_rag.evaluation.calibration.run import CalibrationReport, Progress

_PASSAGES = (3, 5, 10)
_FEWEST_QUESTIONS = 4
_STORE_BYTES = 8 << 30
_STORE = "kv"


def calibrate(
    db: Annotated[Path, typer.Option(help="Database folder, made by `blockattn-rag ingest`.")],
    model: Annotated[
        str | None,
        typer.Option(help=ModelArgument + " Default: the database's.", callback=existing_model),
    ] = None,
    pairs: Annotated[
        int,
        typer.Option(min=_FEWEST_QUESTIONS, help="Questions: half to choose on, half to certify."),
    ] = 100,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Questions as they are asked, .jsonl or .jsonl.gz, a line: "
            '{"question": "..."}. Default: the model writes some about passages.'
        ),
    ] = None,
    passages: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Passages of a prompt; repeat it for several. Default: 3, 5 and 10."
        ),
    ] = None,
    correction: Annotated[
        Path | None, typer.Option(help="File of a correction to try; see `adapt --fit correction`.")
    ] = None,
    merge: Annotated[
        Path | None, typer.Option(help="File of a learned merge to try; see `adapt --fit merge`.")
    ] = None,
    reader: Annotated[
        Path | None, typer.Option(help="Folder of a reader adapter to try; see `adapt`.")
    ] = None,
    most_promoted: Annotated[
        int, typer.Option("--promote", min=0, help="Most passages to try to promote.")
    ] = 2,
    agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Least agreement with full mode, lower bound.")
    ] = 0.9,
    recovery: Annotated[
        float | None,
        typer.Option(max=1, help="Least share of the divergence taken away, lower bound."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 24,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the calibration there, and do not use it. Default: into the database.",
            callback=writable,
        ),
    ] = None,
    keep_records: Annotated[
        bool, typer.Option("--keep-records", help="Keep every comparison in the database folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Do not go on from an interrupted run.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Choose how block mode works for a model and a database, and measure what is left, without
    labels.

    Questions about the database's own passages are answered in full mode; settings of block mode
    are compared with that. What was chosen on one half of the questions is certified on the other.
    A stopped run goes on when it is started again.
    """
    with working(as_json):
        from blockattn_rag.engine.calibration import read_calibrations, write_calibration

        database = Database.open(db, model=model, device=device, dtype=dtype)
        path = output or database.calibration_path
        read_calibrations(path)  # one that cannot be written beside the others is told of now
        work = db / f"calibrate-{database.local_engine.model.fingerprint[:16]}.work"
        if overwrite and work.exists():
            shutil.rmtree(work)
        numbers = sorted(set(passages or _PASSAGES))
        plan = _Plan(pairs, questions, numbers, max_new_tokens, seed)
        targets = {"agreement": agreement, **({} if recovery is None else {"recovery": recovery})}
        with stages() as tell:
            report = _run(
                database,
                plan,
                work,
                tell,
                files=(correction, merge, reader),
                most=most_promoted,
                targets=targets,
            )
        write_calibration(path, report.calibration)
        if keep_records:
            shutil.rmtree(work / _STORE)  # gigabytes, which only a stopped run still needs
            note(f"every comparison is in {work / 'records.jsonl'}")
        else:
            shutil.rmtree(work)
    show_calibration(as_json, report, path, db, database.manifest.model if model is None else model)
    if output is None and database.note_sink(report.choice.setting.sink):
        note(
            f"note: passages were encoded after the sink {database.manifest.sink!r}, and are "
            f"encoded after {report.choice.setting.sink!r} when they are first used; "
            f"`blockattn-rag ingest PATH --db {db}` encodes them all"
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is asked, and with how many passages."""

    pairs: int
    questions: Path | None
    passages: Sequence[int]
    max_new_tokens: int
    seed: int


def _run(
    database: Database,
    plan: _Plan,
    work: Path,
    tell: Progress,
    *,
    files: tuple[Path | None, Path | None, Path | None],
    most: int,
    targets: dict[str, float],
) -> CalibrationReport:
    """Choose and certify, in a store of its own: it fills with blocks after each sink tried.

    ``files``: of a correction, a merge and a reader to try.
    """
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.evaluation.calibration.fits import fits_of
    from blockattn_rag.evaluation.calibration.run import calibrate as run
    from blockattn_rag.evaluation.calibration.settings import SINKS, usable_sinks
    from blockattn_rag.evaluation.calibration.settings import stages as stages_of
    from blockattn_rag.evaluation.records import OtherSettingsError
    from blockattn_rag.prompts.sinks import FIRST_BLOCK, NO_SINK
    from blockattn_rag.store import DirectoryStore
    from blockattn_rag.training.distillation.asked import read_asked

    loaded = database.local_engine.model
    store = DirectoryStore(work / _STORE, max_bytes=_STORE_BYTES, fsync=False)
    asking = database.local_engine
    engine = BlockAttentionEngine(
        loaded, store, namespace=asking.access.namespace, kv_dtype=asking.kv_dtype
    )
    fits = fits_of(loaded, *files)
    asked = {path: read_asked(path) for path in fits.paths}
    choose, certify = _pairs(database, engine, plan, work, tell, asked)
    # Passages are ingested alone, where there is no first block to encode them after.
    sinks = [loaded.tuned_with.get("sink", NO_SINK), *SINKS]
    usable = usable_sinks(loaded.tokenizer, [sink for sink in sinks if sink != FIRST_BLOCK])
    try:
        return run(
            engine,
            choose,
            certify,
            stages_of(
                usable,
                corrected=fits.corrected,
                merged=fits.merged,
                reader=fits.read,
                most_promoted=most,
                supports_relay=loaded.supports_relay,
            ),
            records_path=work / "records.jsonl",
            targets=targets,
            max_new_tokens=plan.max_new_tokens,
            seed=plan.seed,
            package_version=__version__,
            noted={"files": fits.digests},
            on_progress=tell,
        )
    except OtherSettingsError as error:
        raise DataError(f"{error} Here: --overwrite starts anew") from error


def _pairs(
    database: Database,
    engine: BlockAttentionEngine,
    plan: _Plan,
    work: Path,
    tell: Progress,
    seen_by: Mapping[str, Set[str]],
) -> tuple[list[Pair], list[Pair]]:
    """The pairs to choose on, with each number of passages in turn, and those to certify on, each
    with every number. No question is in both.

    ``seen_by``: digests of the questions that each file to try was made with.
    """
    from blockattn_rag.evaluation.calibration.pairs import Pair
    from blockattn_rag.rag.passages import all_passages, retriever
    from blockattn_rag.rag.prompts import prompt_maker
    from blockattn_rag.training.distillation.asked import question_digest

    texts = all_passages(database)
    if not texts:
        raise DataError(f"{database.path} holds no passage; ingest some first")
    numbers = sorted({min(number, len(texts)) for number in plan.passages})
    nearest, make = retriever(database), prompt_maker(database)
    seen: frozenset[str] = frozenset().union(*seen_by.values())
    asked = _unseen_last(_questions(plan, texts, nearest, engine, work, tell), plan.pairs, seen)
    half = len(asked) // 2
    found = {question: nearest(question, numbers[-1]) for question in asked}

    def pair(question: str, number: int) -> Pair:
        digest = question_digest(question)
        by = frozenset(path for path, digests in seen_by.items() if digest in digests)
        return Pair(question, make(question, found[question][:number]), by)

    choose = [pair(q, numbers[n % len(numbers)]) for n, q in enumerate(asked[:half])]
    certify = [pair(q, n) for q in asked[half:] for n in numbers if len(found[q]) >= n]
    return _fitting(choose, engine, plan), _fitting(certify, engine, plan)


def _fitting(pairs: list[Pair], engine: BlockAttentionEngine, plan: _Plan) -> list[Pair]:
    """The pairs whose prompt leaves room for an answer."""
    most = engine.model.max_context_tokens - plan.max_new_tokens
    tokenizer = engine.model.tokenizer
    fitting = [pair for pair in pairs if len(tokenizer.prompt_ids(pair.prompt).flat) <= most]
    if left_out := len(pairs) - len(fitting):
        note(f"left out: {count(left_out, 'prompt')} longer than the model's context window")
    return fitting


def _questions(
    plan: _Plan,
    texts: Sequence[str],
    nearest: Callable[[str, int], list[str]],
    engine: BlockAttentionEngine,
    work: Path,
    tell: Progress,
) -> list[str]:
    """Distinct questions in random order: the user's own, or the model's about passages, which
    are taken in another order than by `adapt`."""
    from blockattn_rag.prompts.formats import Passage
    from blockattn_rag.training.distillation.questions import Collection, write_questions

    if plan.questions is not None:
        given = {text.casefold(): text for text in _read_questions(plan.questions)}
        asked = sorted(given.values())
    else:
        collection = Collection(
            [Passage("", text) for text in texts],
            lambda text, number: [Passage("", found) for found in nearest(text, number)],
        )
        written = write_questions(
            engine, collection, plan.pairs, 1, work / "questions.jsonl", f"calibrate {plan.seed}",
            lambda done, total: tell("writing questions", done, total),
        )  # fmt: skip
        asked = [question.text for question in written.questions]
    random.Random(plan.seed).shuffle(asked)
    if len(asked) < _FEWEST_QUESTIONS:
        raise DataError(
            f"found {count(len(asked), 'distinct question')}, expected at least "
            f"{_FEWEST_QUESTIONS}; give more (--questions FILE), or ingest more passages"
        )
    if len(asked) < plan.pairs:
        note(f"note: {count(len(asked), 'distinct question')} in place of {plan.pairs} (--pairs)")
    return asked


def _unseen_last(asked: Sequence[str], most: int, seen: Set[str]) -> list[str]:
    """So many questions, those in ``seen`` first: the second half certifies."""
    from blockattn_rag.training.distillation.asked import question_digest

    def is_seen(text: str) -> bool:
        return question_digest(text) in seen

    taken = sorted(sorted(asked, key=is_seen)[:most], key=is_seen, reverse=True)
    certifying = taken[len(taken) // 2 :]
    if known := sum(map(is_seen, certifying)):
        note(
            f"note: the reader, correction or merge was made with {known} of "
            f"{count(len(certifying), 'question')} to certify on, which flatters it: settings with "
            f"it will not qualify. Give {2 * known} more that are not (--questions FILE)"
        )
    return taken


def _read_questions(path: Path) -> list[str]:
    """The questions of a file; other keys of its lines are passed over."""
    found = []
    for number, line in numbered_lines(path):
        try:
            found.append(text_of(of_kind(parse_line(line), dict, "a line"), "question").strip())
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    return found
