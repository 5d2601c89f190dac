"""What block mode of a stock model loses, and what each repair takes back: divergence and accuracy.

    python benchmarks/stock_models.py measure --data dev.jsonl.gz --output records.csv \\
        --modes block,sink=head:4,... --answered block,sink=head:4
    python benchmarks/stock_models.py costs --data dev.jsonl.gz --output costs.csv --modes ...
    python benchmarks/stock_models.py table records.csv more.csv --costs costs.csv

``measure`` answers each question in full mode, compares each mode with that along full mode's
answer (``evaluation.fidelity``), and lets the modes in ``--answered`` answer too; these and full
mode are the ones that have an accuracy. Modes are those of ``blockattn-rag eval``, and
``recompute=16``, perhaps ``+`` such a mode: the first 16 tokens of each passage are computed anew
(``sparse_recomputation``). Records hold figures and no texts. What a file holds is not measured
again: a stopped run goes on, and other questions (``--start``) or modes can be added. ``table``
reads several files as one.

``costs`` asks one question after the other, the modes in turns, with the passages' blocks in
memory: prompt tokens computed, and seconds to the first token.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from sparse_recomputation import recomputed_logits

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.evaluation import EvaluationSample, read_samples
from blockattn_rag.evaluation.fidelity import FidelityRecord, compare_modes
from blockattn_rag.evaluation.metrics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    contains_answer,
    f1_score,
)
from blockattn_rag.evaluation.run import files_of_modes, make_prompt, mode_options
from blockattn_rag.model.greedy import greedy_answers
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.sinks import FIRST_BLOCK

FULL = "full"
RECOMPUTE = "recompute="
_STORE_BYTES = 4 << 30
_WINDOW = 5  # batches

app = typer.Typer(help=__doc__, add_completion=False)
Data = Annotated[Path, typer.Option(help="Questions with passages, as `blockattn-rag eval`'s.")]
Modes = Annotated[str, typer.Option(help="Modes, commas between.")]
Passages = Annotated[int, typer.Option("--num-passages")]


@dataclass(frozen=True)
class Row:
    """One question in one mode: divergence from full mode (nats), and scores of its own answer.

    ``accuracy`` and ``f1`` are None where the mode did not answer; ``tokens`` are those of full
    mode's answer, along which ``kl``, ``first_kl`` and ``agreement`` are told. ``setup`` tells
    apart what the mode's name does not: the model, the prompts, and what its files hold.
    """

    id: str
    mode: str
    setup: str
    tokens: int
    kl: float
    first_kl: float
    agreement: float
    accuracy: float | None = None
    f1: float | None = None

    @classmethod
    def read(cls, line: dict[str, str]) -> Row:
        number: dict[str, Any] = {
            name: float(line[name]) if line[name] else None for name in _NUMBERS
        }
        return cls(line["id"], line["mode"], line["setup"], int(line["tokens"]), **number)

    def written(self) -> dict[str, Any]:
        values = asdict(self)
        return {n: f"{v:.5g}" if isinstance(v, float) else v for n, v in values.items()}


_FIELDS = [field.name for field in fields(Row)]
_NUMBERS = _FIELDS[4:]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that was cut off is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [Row.read(line) for line in csv.DictReader(whole)]


def append_rows(path: Path, rows: Sequence[Row], known: Sequence[Row]) -> None:
    """Add rows to a file that holds the known ones, and perhaps a line that was cut off."""
    is_whole = path.exists() and path.read_bytes().endswith(b"\n")
    with path.open("a" if is_whole else "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        if not is_whole:
            writer.writeheader()
            writer.writerows(row.written() for row in known)
        writer.writerows(row.written() for row in rows)


class Comparison:
    """Several questions at once: full mode's answers, then each mode beside them."""

    def __init__(
        self,
        engine: BlockAttentionEngine,
        samples: Sequence[EvaluationSample],
        tokens: int,
        setups: Mapping[str, str],
    ) -> None:
        self._engine, self._samples, self._most = engine, samples, tokens
        self._setups = setups
        model = engine.model
        self._prompts = [make_prompt(engine, CHAT, sample, FULL) for sample in samples]
        ids = [model.tokenizer.prompt_ids(prompt).flat for prompt in self._prompts]
        answers = greedy_answers(model, ids, tokens)
        self._answers = [answer.tolist() for answer, _ in answers]
        self._expected = [torch.log_softmax(logits.double(), -1) for _, logits in answers]

    def full(self) -> list[Row]:
        """Full mode's own scores; it does not diverge from itself."""
        decode = self._engine.model.tokenizer.tokenizer.decode
        texts = [decode(answer, skip_special_tokens=True) for answer in self._answers]
        compared = [
            Row(sample.id, FULL, self._setups[FULL], len(answer), 0.0, 0.0, 1.0)
            for sample, answer in zip(self._samples, self._answers, strict=True)
        ]
        return self._scored(compared, texts)

    def rows(self, mode: str, answers_too: bool) -> list[Row]:
        self._encode(mode)
        found = [self._compared(index, mode) for index in range(len(self._samples))]
        setup = self._setups[mode]
        rows = [
            Row(one.id, mode, setup, one.tokens, one.kl, one.first_kl, one.agreement)
            for one in found
        ]
        if not answers_too:
            return rows
        given = self._engine.generate_batch(
            [make_prompt(self._engine, CHAT, sample, mode) for sample in self._samples],
            **mode_options(mode),
            max_new_tokens=self._most,
            batch_size=len(self._samples),
        )
        return self._scored(rows, [answer.text for answer in given])

    def _compared(self, index: int, mode: str) -> FidelityRecord:
        sample, prompt = self._samples[index], self._prompts[index]
        answer, expected = self._answers[index], self._expected[index]
        if mode.startswith(RECOMPUTE):
            first = int(mode.removeprefix(RECOMPUTE).partition("+")[0])
            how = GenerateOptions.parse(_options(mode), GenerateOptions())
            logits = recomputed_logits(self._engine, prompt, answer, how, first)
            return FidelityRecord.compared(sample, mode, logits, expected)

        def prompt_in(name: str) -> BlockPrompt:
            return make_prompt(self._engine, CHAT, sample, name)

        (record,) = compare_modes(self._engine, sample, [mode], prompt_in, answer, expected)
        return record

    def _encode(self, mode: str) -> None:
        """The blocks of all questions, together where they are the same in every prompt."""
        how = _options(mode)
        if how["mode"] != "block":
            return
        encoded = {name: how[name] for name in ("sink", "correction")}
        if encoded["sink"] == FIRST_BLOCK:
            for prompt in self._prompts:
                self._engine.precompute(prompt.context, as_prompt=True, **encoded)
            return
        passages = [b for prompt in self._prompts for b in prompt.context if b.is_passage]
        self._engine.precompute(passages, **encoded)

    def _scored(self, rows: Sequence[Row], texts: Sequence[str]) -> list[Row]:
        return [
            replace(
                row,
                accuracy=contains_answer(text, sample.answers),
                f1=f1_score(text, sample.answers),
            )
            for row, text, sample in zip(rows, texts, self._samples, strict=True)
        ]


def _options(mode: str) -> dict[str, Any]:
    """How the engine is called in a mode; of ``recompute=16+MODE``, in MODE."""
    return mode_options(_without_recomputation(mode))


def _without_recomputation(mode: str) -> str:
    return (mode.partition("+")[2] or "block") if mode.startswith(RECOMPUTE) else mode


def _engine(model: str) -> BlockAttentionEngine:
    """An engine in which each mode computes all of its own answer, without `engine.tails`."""
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    store = MemoryStore(_STORE_BYTES)
    return BlockAttentionEngine.from_pretrained(model, store=store, resident_bytes=0)


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
    if unknown := set(answering) - set(wanted):
        raise typer.BadParameter(f"--answered names {sorted(unknown)}, which --modes lacks")
    for mode in wanted:
        _options(mode)
    known = read_rows(output)
    setups = {mode: _setup(mode, model, num_passages, max_new_tokens) for mode in [FULL, *wanted]}
    _check_setups(known, setups, output)
    engine = _engine(model)
    samples = _samples(data, start, limit, num_passages)
    done = {(row.id, row.mode) for row in known if _is_done(row, answering)}
    for number, batch in enumerate(_batches(engine, samples, batch_size)):
        missing = [m for m in wanted if any((s.id, m) not in done for s in batch)]
        if not missing:
            continue
        comparison = Comparison(engine, batch, max_new_tokens, setups)
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
    files = files_of_modes([_without_recomputation(mode)])
    told = [model, str(num_passages), str(max_new_tokens), *files.values()]
    return hashlib.sha256("/".join(told).encode()).hexdigest()[:8]


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
    engine, wanted = _engine(model), modes.split(",")
    tokens: dict[str, list[int]] = {mode: [] for mode in wanted}
    seconds: dict[str, list[float]] = {mode: [] for mode in wanted}
    samples = _samples(data, 0, limit + 1, num_passages)
    for sample in samples:  # the first one warms up
        for mode in wanted:
            prompt, how = make_prompt(engine, CHAT, sample, mode), mode_options(mode)
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
def table(
    records: list[Path],
    costs: Annotated[Path | None, typer.Option(help="File of `costs`.")] = None,
    modes: Annotated[str, typer.Option(help="Those to show, commas between; all if none.")] = "",
) -> None:
    """Print a table in Markdown, with 95 % intervals; each mode beside block mode over the
    questions that both were asked."""
    by_mode: dict[str, dict[str, Row]] = {}
    for row in (row for path in records for row in read_rows(path)):
        by_mode.setdefault(row.mode, {})[row.id] = row
    cost = _read_costs(costs) if costs else {}
    shown = modes.split(",") if modes else [mode for mode in by_mode if mode != FULL]
    print("| mode | questions | KL | first token | agreement | recovered | tokens | first token |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in shown:
        cells = [*_divergence(by_mode[mode], by_mode["block"]), *cost.get(mode, ("", ""))]
        print("| " + " | ".join([f"`{_named(mode)}`", *cells]) + " |")
    print("\n| mode | questions | right | less full mode's | F1 | less full mode's |")
    print("|---|---|---|---|---|---|")
    for mode in [FULL, *shown]:
        told = {name: row for name, row in by_mode[mode].items() if row.accuracy is not None}
        if told:
            print("| " + " | ".join([f"`{_named(mode)}`", *_scores(told, by_mode[FULL])]) + " |")


def _named(mode: str) -> str:
    """A mode without the names of files within the folders that `blockattn-rag adapt` makes."""
    return mode.replace("/correction.safetensors", "").replace("/merge.safetensors", "")


def _divergence(rows: dict[str, Row], block: dict[str, Row]) -> list[str]:
    kl, first = ([getattr(row, name) for row in rows.values()] for name in ("kl", "first_kl"))
    agreement = bootstrap_mean([row.agreement for row in rows.values()])
    both = [(block[name].kl, row.kl) for name, row in rows.items() if name in block]
    lost = [of_block - of_mode for of_block, of_mode in both]
    # The floor, some 1e-12, is left out: full attention in two steps differs by rounding alone.
    recovered = bootstrap_ratio(lost, [of_block for of_block, _ in both]) if any(lost) else None
    return [
        str(len(rows)),
        _shown(bootstrap_mean(kl), ".3f"),
        f"{statistics.fmean(first):.3f}",
        _shown(agreement, ".0%"),
        _shown(recovered, ".0%") if recovered else "",
    ]


def _scores(rows: dict[str, Row], full: dict[str, Row]) -> list[str]:
    cells = [str(len(rows))]
    for name in ("accuracy", "f1"):
        scores = {id: getattr(row, name) for id, row in rows.items()}
        apart = [score - getattr(full[id], name) for id, score in scores.items()]
        cells += [_shown(bootstrap_mean([*scores.values()]), ".1%")]
        cells += [_shown(bootstrap_mean(apart), "+.1%") if any(apart) else ""]
    return cells


def _shown(found: Interval, form: str) -> str:
    mean, low, high = (format(value, form).replace("%", " %") for value in found)
    return f"{mean} ({low.removesuffix(' %')} to {high.removesuffix(' %')})"


def _read_costs(path: Path) -> dict[str, tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    return {
        line["mode"]: (f"{float(line['computed_tokens']):.0f}", f"{float(line['ttft_s']):.2f} s")
        for line in lines
    }


if __name__ == "__main__":
    app()
