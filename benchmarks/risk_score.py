"""Can block mode tell from its own predictions that its answer is not full mode's?

    python benchmarks/risk_score.py --tune tune.jsonl.gz --data dev.jsonl.gz --output risk.jsonl \\
        --mode sink=head:4+correction=kv/correction.safetensors

Block mode answers each question greedily in the mode named, and so does full mode. Signals that
cost nothing are read off block mode's own predictions along its own answer. For each signal it
prints the area under the ROC curve (AUC) for two events: the answer differs from full mode's, and
it is wrong where full mode's is right. The tune file chooses the signal; the data file, whose
figures come with 95 % bootstrap intervals, judges it. A run that was stopped goes on with --output.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from torch import Tensor
from torch.nn import functional as F

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.evaluation import (
    EvaluationSample,
    contains_answer,
    normalize_answer,
    read_samples,
)
from blockattn_rag.evaluation.fidelity import full_answer
from blockattn_rag.evaluation.modes import mode_options
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.prompts.formats import CHAT

SIGNALS: dict[str, Callable[[Tensor], float]] = {
    "first token's surprise": lambda chosen: -float(chosen[0]),
    "worst token's surprise": lambda chosen: -float(chosen.min()),
    "mean surprise": lambda chosen: -float(chosen.mean()),
    "sum of surprises": lambda chosen: -float(chosen.sum()),
    "tokens of the answer": lambda chosen: float(len(chosen)),
}
"""From the log-probabilities of the answer's tokens, float64 ``[tokens]``; more is riskier."""

EVENTS = ("differs", "newly wrong")


def observe(
    engine: BlockAttentionEngine, sample: EvaluationSample, mode: str, max_new_tokens: int
) -> dict[str, Any]:
    """Signals and events of one question."""
    prompt = make_prompt(engine, CHAT, sample, mode)
    decode = engine.model.tokenizer.tokenizer.decode
    full = decode(full_answer(engine, prompt, max_new_tokens)[0], skip_special_tokens=True)
    options = mode_options(mode)
    answer = engine.generate(prompt, max_new_tokens=max_new_tokens, **options)
    logits = engine.answer_logits(prompt, answer.token_ids, **options)
    chosen = F.log_softmax(logits.double(), -1).max(-1).values
    right = [contains_answer(text, sample.answers) for text in (full, answer.text)]
    return {
        "id": sample.id,
        **{name: signal(chosen) for name, signal in SIGNALS.items()},
        "differs": normalize_answer(full) != normalize_answer(answer.text),
        "newly wrong": right[0] > right[1],
    }


def auc(scores: np.ndarray, happened: np.ndarray) -> float:
    """Chance that one that happened has the higher score; ties count half.

    Raises:
        ValueError: it happened never, or always.
    """
    if happened.all() or not happened.any():
        raise ValueError(
            f"found an event that happened {happened.sum()} times of {len(happened)}, expected "
            "both at least once: ask more questions"
        )
    yes, no = scores[happened], scores[~happened]
    above = (yes[:, None] > no).mean()
    return float(above + (yes[:, None] == no).mean() / 2)


def interval(
    scores: np.ndarray, happened: np.ndarray, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of the AUC, which raises as ``auc`` does."""
    auc(scores, happened)  # without both there is no draw with both
    draw = np.random.default_rng(seed)
    found: list[float] = []
    while len(found) < 2000:
        rows = draw.integers(len(scores), size=len(scores))
        if 0 < happened[rows].sum() < len(rows):
            found.append(auc(scores[rows], happened[rows]))
    low, high = np.quantile(found, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def judged(event: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines on how well each signal tells an event.

    Args:
        event: one of ``EVENTS``.
        rows: of ``"tune"`` and ``"data"``, what was observed of each question.
    """
    happened = {name: np.array([row[event] for row in rows[name]]) for name in rows}
    lines = [f"{event}: {happened['data'].mean():.0%} of {len(rows['data'])} questions"]
    for name, of_all in happened.items():
        if of_all.all() or not of_all.any():
            often = "always" if of_all.all() else "never"
            return [*lines, f"  no figures: it {often} happened on the questions of --{name}"]
    scores = {
        (name, signal): np.array([row[signal] for row in rows[name]])
        for name in rows
        for signal in SIGNALS
    }
    best = max(SIGNALS, key=lambda signal: auc(scores["tune", signal], happened["tune"]))
    for signal in SIGNALS:
        values = scores["data", signal]
        low, high = interval(values, happened["data"])
        chosen = auc(scores["tune", signal], happened["tune"])
        lines.append(
            f"{'*' if signal == best else ' '} {signal:24} tune {chosen:.3f}, "
            f"data {auc(values, happened['data']):.3f} ({low:.3f}-{high:.3f})"
        )
    return lines


def main(
    tune: Annotated[Path, typer.Option()],
    data: Annotated[Path, typer.Option()],
    output: Annotated[Path, typer.Option()],
    mode: str = "sink=head:4",
    model: str = "smollm2",
    tune_limit: int = 150,
    limit: int = 300,
    num_passages: int = 5,
    max_new_tokens: int = 24,
) -> None:
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    engine = BlockAttentionEngine.from_pretrained(model, store=MemoryStore(1 << 28))
    lines = output.read_text().splitlines() if output.exists() else []
    done = {row["file"] + row["id"]: row for row in map(json.loads, lines)}
    rows: dict[str, list[dict[str, Any]]] = {"tune": [], "data": []}
    for name, path, most in (("tune", tune, tune_limit), ("data", data, limit)):
        for sample in read_samples(path, limit=most):
            row = done.get(name + sample.id)
            if row is None:
                shown = sample.with_passages(num_passages)
                row = {"file": name} | observe(engine, shown, mode, max_new_tokens)
                with output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            rows[name].append(row)
    for event in EVENTS:
        print("", *judged(event, rows), sep="\n")


if __name__ == "__main__":
    typer.run(main)
