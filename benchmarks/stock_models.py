"""What block mode of a stock model loses, and what each repair takes back: divergence and accuracy.

    python benchmarks/stock_models.py measure --data dev.jsonl.gz --output records.csv \\
        --modes block,sink=head:4,... --answered block,sink=head:4
    python benchmarks/stock_models.py costs --data dev.jsonl.gz --output costs.csv --modes ...
    python benchmarks/stock_models.py table records.csv more.csv --costs costs.csv
    python benchmarks/stock_models.py answers --data tune.jsonl.gz --output own-answers.jsonl

``measure`` answers each question in full mode, compares each mode with that along full mode's
answer (``evaluation.fidelity``), and lets the modes in ``--answered`` answer too; these and full
mode are the ones that have an accuracy. Modes are those of ``blockattn-rag eval``, and two more,
perhaps with ``+`` and such a block mode behind them. ``recompute=16``: the first 16 tokens of each
passage are computed anew (``sparse_recomputation``). ``model=FOLDER``: block mode of another model,
one that was fine-tuned from the stock model, along the stock model's answers. Records hold figures
and no texts. What a file holds is not measured again: a stopped run goes on, and other questions
(``--start``) or modes can be added. ``table`` reads several files as one.

``costs`` asks one question after the other, the modes in turns, with the passages' blocks in
memory: prompt tokens computed, and seconds to the first token.

``answers`` writes full mode's answers as samples for ``blockattn-rag train``: a model that is
fine-tuned on its own answers learns block mode, and no other answers.
"""

from __future__ import annotations

import csv
import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from stock_comparison import MODEL, RECOMPUTE, Comparison, Parts, engines_of, full_answers, text_of
from stock_records import FULL, Row, append_rows, read_rows, tables

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.evaluation import EvaluationSample, read_samples
from blockattn_rag.evaluation.modes import files_of_modes, mode_options
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.files.atomic import replacing
from blockattn_rag.files.jsonl import numbered_lines, parse_line
from blockattn_rag.files.records import Record, of_kind
from blockattn_rag.prompts.formats import CHAT

_WINDOW = 5  # batches

app = typer.Typer(help=__doc__, add_completion=False)
Data = Annotated[Path, typer.Option(help="Questions with passages, as `blockattn-rag eval`'s.")]
Modes = Annotated[str, typer.Option(help="Modes, commas between.")]
Passages = Annotated[int, typer.Option("--num-passages")]


def _samples(data: Path, start: int, limit: int, num_passages: int) -> list[EvaluationSample]:
    found = read_samples(data, limit=start + limit)[start:]
    return [sample.with_passages(num_passages) for sample in found]


def _batches(
    engine: BlockAttentionEngine, samples: Sequence[EvaluationSample], size: int
) -> Iterator[list[EvaluationSample]]:
    """Questions with prompts of similar length together, from a few batches at a time: so that a
    run that was stopped has measured the first questions, long ones and short ones."""

    def length(sample: EvaluationSample) -> int:
        return len(engine.model.tokenizer.prompt_ids(make_prompt(engine, CHAT, sample, FULL)).flat)

    for start in range(0, len(samples), _WINDOW * size):
        window = sorted(samples[start : start + _WINDOW * size], key=length)
        for first in range(0, len(window), size):
            yield window[first : first + size]


@app.command()
def measure(
    data: Data,
    output: Annotated[Path, typer.Option(help="Record file, CSV.")],
    modes: Modes,
    answered: Annotated[str, typer.Option(help="Those of the modes that answer, too.")] = "",
    model: str = "smollm2",
    start: Annotated[int, typer.Option(help="Questions to pass over.")] = 0,
    limit: Annotated[int, typer.Option(help="Questions to ask.")] = 500,
    num_passages: Passages = 5,
    max_new_tokens: int = 24,
    batch_size: int = 8,
) -> None:
    """Compare modes with full mode."""
    wanted, answering = modes.split(","), answered.split(",") if answered else []
    if FULL in wanted:
        raise typer.BadParameter("--modes names full, which is always measured; leave it out")
    if unknown := set(answering) - set(wanted):
        raise typer.BadParameter(f"--answered names {sorted(unknown)}, which --modes lacks")
    _refuse_recomputation(answering, "--answered")
    known = read_rows(output)
    setups = {mode: _setup(mode, model, num_passages, max_new_tokens) for mode in [FULL, *wanted]}
    _check_setups(known, setups, output)
    engines = engines_of(model, wanted)
    samples = _samples(data, start, limit, num_passages)
    done = {(row.id, row.mode) for row in known if _is_done(row, answering)}
    for number, batch in enumerate(_batches(engines[FULL], samples, batch_size)):
        missing = [m for m in wanted if any((s.id, m) not in done for s in batch)]
        if not missing:
            continue
        comparison = Comparison(engines, batch, max_new_tokens, setups)
        rows = comparison.full()
        for mode in missing:
            rows += comparison.rows(mode, mode in answering)
        new = [row for row in rows if (row.id, row.mode) not in done]
        append_rows(output, new, known)
        known += new
        done |= {(row.id, row.mode) for row in new}
        print(f"batch {number}: {len(batch)} questions", flush=True)


def _setup(mode: str, model: str, num_passages: int, max_new_tokens: int) -> str:
    """A digest, 8 hex digits, of what a row depends on beside the question and the mode's name."""
    own, value, rest = Parts.of(mode)
    told = [model, str(num_passages), str(max_new_tokens), *files_of_modes([rest]).values()]
    if own == MODEL:
        told += _weights_digests(Path(value))
    return hashlib.sha256("/".join(told).encode()).hexdigest()[:8]


def _weights_digests(folder: Path) -> list[str]:
    """sha256 of each file of a model's weights."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    if not found:
        raise typer.BadParameter(
            f"found no weights (*.safetensors) in {folder}; expected the folder of a model, as "
            "`blockattn-rag train` writes it"
        )
    return found


def _refuse_recomputation(modes: Sequence[str], where: str) -> None:
    if found := [mode for mode in modes if Parts.of(mode).own == RECOMPUTE]:
        raise typer.BadParameter(
            f"{found} can be compared along full mode's answer alone; leave them out of {where}"
        )


def _check_setups(known: Sequence[Row], setups: Mapping[str, str], path: Path) -> None:
    """Refuse to add to rows of the same mode that were measured with something else."""
    for row in known:
        if row.setup != setups.get(row.mode, row.setup):
            raise typer.BadParameter(
                f"{path} holds rows of {row.mode} with another model, other prompts or other files "
                f"({row.setup}, expected {setups[row.mode]}); name another --output"
            )


def _is_done(row: Row, answering: Sequence[str]) -> bool:
    return row.mode not in answering or row.accuracy is not None


@app.command()
def costs(
    data: Data,
    output: Annotated[Path, typer.Option(help="Result file, CSV.")],
    modes: Modes,
    model: str = "smollm2",
    limit: int = 20,
    num_passages: Passages = 5,
) -> None:
    """Measure what a question costs in each mode."""
    wanted = modes.split(",")
    _refuse_recomputation(wanted, "costs")
    engines = engines_of(model, wanted)
    tokens: dict[str, list[int]] = {mode: [] for mode in wanted}
    seconds: dict[str, list[float]] = {mode: [] for mode in wanted}
    samples = _samples(data, 0, limit + 1, num_passages)
    for sample in samples:  # the first one warms up
        for mode in wanted:
            engine, rest = engines[mode], Parts.of(mode).rest
            prompt, how = make_prompt(engines[FULL], CHAT, sample, rest), mode_options(rest)
            if how["mode"] == "block":
                encoded = {name: how[name] for name in ("sink", "correction")}
                engine.precompute(prompt.context, as_prompt=True, **encoded)
            stats = engine.generate(prompt, max_new_tokens=1, do_sample=False, **how).stats
            if sample is not samples[0]:
                tokens[mode].append(stats.computed_tokens)
                seconds[mode].append(stats.ttft_s)
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["mode", "computed_tokens", "ttft_s"])
        for mode in wanted:
            median = statistics.median(seconds[mode])
            writer.writerow([mode, f"{statistics.fmean(tokens[mode]):.1f}", f"{median:.4g}"])


@app.command()
def answers(
    data: Data,
    output: Annotated[Path, typer.Option(help="Samples, JSON lines.")],
    model: str = "smollm2",
    start: Annotated[int, typer.Option(help="Questions to pass over.")] = 0,
    limit: Annotated[int, typer.Option(help="Questions to ask.")] = 300,
    num_passages: Passages = 5,
    max_new_tokens: int = 128,
    batch_size: int = 8,
) -> None:
    """Write full mode's answers as samples for `blockattn-rag train`.

    An answer that does not end within --max-new-tokens is left out, because training closes each
    answer: the model would learn to stop there. A run that goes on asks for these again.
    """
    setup = _setup(FULL, model, num_passages, max_new_tokens)
    known = _read_answers(output, setup)
    engine = engines_of(model, [])[FULL]
    done = {line["id"] for line in known}
    asked = [s for s in _samples(data, start, limit, num_passages) if s.id not in done]
    for number, batch in enumerate(_batches(engine, asked, batch_size)):
        ended = _training_lines(engine, batch, max_new_tokens)
        known += [{**line, "setup": setup} for line in ended]
        with replacing(output) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in known)
        print(f"batch {number}: {len(ended)} of {len(batch)} answers ended", flush=True)


def _training_lines(
    engine: BlockAttentionEngine, samples: Sequence[EvaluationSample], tokens: int
) -> list[Record]:
    """Those of full mode's answers that end, with what they answer, as ``training.data`` reads."""
    prompts = [make_prompt(engine, CHAT, sample, FULL) for sample in samples]
    lines: list[Record] = []
    for sample, (answer, _) in zip(samples, full_answers(engine, prompts, tokens), strict=True):
        passages = [{"title": p.title, "text": p.text} for p in sample.passages]
        text = text_of(engine, answer.tolist())
        if int(answer[-1]) in engine.model.end_token_ids and text.strip():
            line = {"question": sample.question, "passages": passages, "answer": text}
            lines.append({"id": sample.id, **line})
    return lines


def _read_answers(path: Path, setup: str) -> list[Record]:
    lines = numbered_lines(path) if path.exists() else ()
    known: list[Record] = [of_kind(parse_line(line), dict, "a line") for _, line in lines]
    if any(line.get("setup") != setup for line in known):
        raise typer.BadParameter(
            f"{path} holds other lines than answers of this model to such prompts; name another "
            "--output"
        )
    return known


@app.command()
def table(
    records: list[Path],
    costs: Annotated[Path | None, typer.Option(help="File of `costs`.")] = None,
    modes: Annotated[str, typer.Option(help="Those to show, commas between; all if none.")] = "",
) -> None:
    """Print a table in Markdown, with 95 % intervals; each mode beside block mode over the
    questions that both were asked."""
    rows = (row for path in records for row in read_rows(path))
    try:
        print(*tables(rows, costs, modes.split(",") if modes else []), sep="\n")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
