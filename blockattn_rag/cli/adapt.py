"""``blockattn-rag adapt``: a stock model's block mode is taught to answer as its full mode does.

The options are made from the fields of ``AdaptConfig``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from blockattn_rag.cli.figures import duration
from blockattn_rag.cli.output import JsonOption, ModelArgument, emit, note, stages, table, working
from blockattn_rag.rag.model_names import existing_model, loading
from blockattn_rag.training.distillation.config import AdaptConfig

if TYPE_CHECKING:
    from blockattn_rag.model import BlockModel
    from blockattn_rag.prompts.formats import Passage
    from blockattn_rag.training.distillation.questions import Collection, Nearest
    from blockattn_rag.training.distillation.report import AdaptReport
    from blockattn_rag.training.distillation.samples import Question
    from blockattn_rag.training.distillation.student import BlockSource

_EMBEDDING_SIZE = 1024
_EMBEDDED_AT_ONCE = 512

# Name, type, default and help of the options that are no settings of a run.
_OWN: tuple[tuple[str, Any, Any, str], ...] = (
    ("model", str | None, None, ModelArgument + " Default: that of the database."),
    (
        "passages",
        Path | None,
        None,
        'Database folder, or .jsonl or .jsonl.gz; a line: {"title": "...", "text": "..."}',
    ),
    (
        "questions",
        Path | None,
        None,
        'Questions as they are asked, .jsonl or .jsonl.gz; a line: {"question": "..."}, perhaps '
        'with its own "passages" as for `eval`. Default: the model writes some.',
    ),
    ("device", str, "auto", "auto, cpu, cuda, mps."),
    ("dtype", str, "auto", "auto, float32, bfloat16, float16."),
)


def adapt(**options: Any) -> None:
    """Repair block mode of a model that was not block-fine-tuned, without labels.

    The model in full mode is the teacher. A reader and a merge act while the final block and the
    answer are computed, so passages' stored keys and values stay as they are: use them with
    reader=OUTPUT, or merge=OUTPUT/merge.safetensors. A correction (correction=
    OUTPUT/correction.safetensors) acts when passages are encoded.
    """
    as_json = options.pop("as_json")
    own = {name: options.pop(name) for name, *_ in _OWN}
    with working(as_json):
        from blockattn_rag.training.distillation.adapt import adapt as run

        if options["targets"] is not None:
            options["targets"] = tuple(options["targets"])
        model, source, sink, nearest, passages = _opened(**own)
        given = {**options, "sink": options["sink"] or sink or model.tuned_with.get("sink", "none")}
        config = AdaptConfig(**given)
        material = _material(own["questions"], passages, nearest, config)
        with stages() as tell:
            report = run(model, material, config, source=source, on_progress=tell)
    _show(report, config, as_json)


def _options() -> Iterator[Parameter]:
    for name, kind, default, text in _OWN:
        callback = existing_model if name == "model" else None
        yield _option(name, kind, default, typer.Option(help=text, callback=callback))
    types = get_type_hints(AdaptConfig)
    for setting in fields(AdaptConfig):
        name, kind, default = setting.name, types[setting.name], setting.default
        if name == "output":
            option = typer.Option(help="Folder of the result.")
            yield _option(name, Path, Parameter.empty, option)
            continue
        flag = {"targets": "target"}.get(name, name).replace("_", "-")
        option = typer.Option(f"--{flag}", help=setting.metadata["help"] or None)
        kind = {"fit": str, "targets": list[str] | None, "sink": str | None}.get(name, kind)
        yield _option(name, kind, None if name == "sink" else default, option)
    yield Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)


def _option(name: str, kind: Any, default: Any, option: Any) -> Parameter:
    annotation = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# typer reads the options from the signature.
adapt.__signature__ = Signature([*_options()])  # type: ignore[attr-defined]


def _opened(
    model: str | None,
    passages: Path | None,
    questions: Path | None,
    device: str,
    dtype: str,
) -> tuple[BlockModel, BlockSource | None, str | None, Nearest | None, Sequence[Passage]]:
    """The model; the keys and values and the sink of a database; what finds passages, and all of
    them."""
    from blockattn_rag.model import BlockModel
    from blockattn_rag.prompts.formats import Passage
    from blockattn_rag.rag.database import Database
    from blockattn_rag.rag.passages import all_passages, retriever
    from blockattn_rag.training.distillation.files import read_passages
    from blockattn_rag.training.distillation.student import BlockSource

    if passages is None and questions is None:
        raise ValueError("found neither passages nor questions; give --passages FILE-or-DB")
    if passages is not None and passages.is_dir():
        database = Database.open(passages, model=model, device=device, dtype=dtype)
        find = retriever(database)

        def nearest(text: str, count: int) -> list[Passage]:
            return [Passage("", found) for found in find(text, count)]

        engine = database.local_engine
        texts = [Passage("", text) for text in all_passages(database)]
        source = BlockSource(engine.model, engine.store, engine.access, engine.kv_dtype)
        return engine.model, source, database.manifest.sink, nearest, texts
    if model is None:
        raise ValueError("found no model; give --model, or a database as --passages")
    read = [] if passages is None else read_passages(passages)
    with loading(model):
        # Packed weights serve answers; training would make them anew at every change of mode.
        loaded = BlockModel.from_pretrained(model, device=device, dtype=dtype, pack_weights=False)
    return loaded, None, None, _Lexical(read) if read else None, read


class _Lexical:
    """The passages that share most words with a text."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import numpy as np

        texts = [f"{passage.title}\n{passage.text}" for passage in passages]
        parts = range(0, len(texts), _EMBEDDED_AT_ONCE)
        self._passages = passages
        self._vectors = np.concatenate(
            [self._embed(texts[start : start + _EMBEDDED_AT_ONCE]) for start in parts]
        )

    def __call__(self, text: str, count: int) -> list[Passage]:
        (vector,) = self._embed([text])
        best = (-(self._vectors @ vector)).argsort(kind="stable")[:count]
        return [self._passages[index] for index in best]

    @staticmethod
    def _embed(texts: Sequence[str]) -> Any:
        import numpy as np

        from blockattn_rag.adapters.hashed_embedding import hashed_vectors

        return np.array(hashed_vectors(texts, _EMBEDDING_SIZE), dtype=np.float32)


def _material(
    questions: Path | None,
    passages: Sequence[Passage],
    nearest: Nearest | None,
    config: AdaptConfig,
) -> Sequence[Question] | Collection:
    """Questions with passages, or passages to write questions about."""
    from blockattn_rag.training.distillation.files import read_questions
    from blockattn_rag.training.distillation.questions import Collection

    if questions is not None:
        return read_questions(questions, nearest, config.max_passages)
    assert nearest is not None  # because passages were given
    return Collection(passages, nearest)


def _show(report: AdaptReport, config: AdaptConfig, as_json: bool) -> None:
    from blockattn_rag.training.distillation.report import result_in

    rows = [
        (name, f"{found.kl:.4f}", f"{100 * found.agreement:.1f} %") for name, found in report.rows
    ]
    times = ", ".join(f"{stage} {duration(took)}" for stage, took in report.seconds.items())
    use = f"{config.fit}={result_in(str(report.output), config.fit)}"
    emit(
        as_json,
        report.to_dict(),
        table("Held-out divergence from full mode", ("mode", "KL", "agreement"), rows),
        f"{report.data} Took: {times} (fetching is part of training).",
        f"The result is in {report.output}. Use it: {use}, sink={config.sink}.",
    )
    if not report.improved:
        note(
            f"the held-out divergence did not fall ({report.before.kl:.4f} before, "
            f"{report.after.kl:.4f} after): do not use this result. More samples (--samples), "
            "another learning rate (--learning-rate) or full mode may help"
        )
        raise typer.Exit(1)
