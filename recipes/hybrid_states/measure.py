"""Measure the accuracy of the trained models: ``python -m recipes.hybrid_states.measure OUT``.

An answer is right if each of its tokens is the model's first choice after the preceding tokens,
that is, if greedy decoding generates it. The entities in the questions do not occur in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from blockattn_rag.files import write_json
from blockattn_rag.lab.evaluation.metrics import bootstrap_mean
from blockattn_rag.model.loading import load_model, load_tokenizer
from recipes.hybrid_states.model import build_model, sink_of
from recipes.hybrid_states.prompts import KINDS, Prompt, held_out_prompts
from recipes.hybrid_states.states import Treatment, collate
from recipes.hybrid_states.train import PROMOTE, STAGES, answer_logits, load_weights

PASSAGES = 5
BATCH = 10


@torch.inference_mode()
def right_answers(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    treatment: Treatment,
    promote: int,
) -> list[float]:
    """Return 1.0 for each prompt with a right answer, and 0.0 for the others."""
    sink, kernel = sink_of(tokenizer), model.config.linear_conv_kernel_dim
    scores: list[float] = []
    for start in range(0, len(prompts), BATCH):
        batch = collate(prompts[start : start + BATCH], treatment, sink, promote, kernel)
        logits, targets, is_answer = answer_logits(model, batch)
        is_right = torch.ones_like(is_answer)
        is_right[is_answer] = logits.argmax(-1) == targets
        scores += is_right.all(dim=1).float().tolist()
    return scores


def measure(out: Path, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row per model, treatment and question type: ``accuracy`` with ``low`` and ``high``
    (95 % bootstrap interval), and the paired ``difference`` from the model in full mode, with
    ``difference_low`` and ``difference_high``."""
    tokenizer = load_tokenizer("bundled")
    questions = {kind: held_out_prompts(tokenizer, kind, PASSAGES, samples, seed) for kind in KINDS}
    model = build_model(load_model("bundled", device="cpu", dtype=torch.float32))
    model.train(False)
    for trained in (stage for stage in STAGES if (out / f"{stage}.pt").exists()):
        load_weights(model, out, trained)
        full: dict[str, list[float]] = {}
        for treatment, promote in ways(trained):
            for kind, prompts in questions.items():
                scores = right_answers(model, tokenizer, prompts, treatment, promote)
                accuracy = bootstrap_mean(scores)
                pairs = zip(scores, full.setdefault(kind, scores), strict=True)
                difference = bootstrap_mean([score - other for score, other in pairs])
                yield {
                    "trained": trained,
                    "treatment": treatment,
                    "promote": promote,
                    "kind": kind,
                    "samples": samples,
                    "accuracy": accuracy.mean,
                    "low": accuracy.low,
                    "high": accuracy.high,
                    "difference": difference.mean,
                    "difference_low": difference.low,
                    "difference_high": difference.high,
                }


def ways(trained: Treatment) -> list[tuple[Treatment, int]]:
    """Return the treatments to measure a model with, and their numbers of promoted passages: all
    for the model trained in full mode, those with ``PROMOTE`` for the model trained with ``head``,
    and only the treatment used in training for the others."""
    blocks = [t for t in get_args(Treatment) if t != "full"]
    promoted = [(t, PROMOTE) for t in blocks if trained in ("full", "head", t)]
    return [("full", 0), *promoted, *((t, 0) for t in blocks if trained == "full")]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table: percent ± half the interval, and difference from full mode."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [
        f"| trained in | final block starts from | promote | {' | '.join(kinds)} |",
        "|---|---|---|" + "---|" * len(kinds),
    ]
    for way in dict.fromkeys((row["trained"], row["treatment"], row["promote"]) for row in rows):
        found = {
            row["kind"]: row
            for row in rows
            if (row["trained"], row["treatment"], row["promote"]) == way
        }
        shown = [_cell(found[kind]) if kind in found else "-" for kind in kinds]
        trained, treatment, promote = way
        modes = "full" if trained == "full" else f"full, {trained}"
        start = "- (full mode) | -" if treatment == "full" else f"{treatment} | {promote}"
        lines.append(f"| {modes} | {start} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    cell = f"{row['accuracy'] * 100:.1f} ± {(row['high'] - row['low']) * 50:.1f}"
    if row["treatment"] == "full":
        return cell
    low, high = row["difference_low"] * 100, row["difference_high"] * 100
    return f"{cell} ({low:+.1f} to {high:+.1f})"


def main(
    out: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of models.")],
    samples: Annotated[int, typer.Option(min=1, help="Questions per type.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 1,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="JSON output file.")] = None,
) -> None:
    """Print a table of accuracy by training, treatment and question type."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for row in measure(out, samples, seed):
        rows.append(row)
        typer.echo(f"{row}", err=True)
        if output:
            write_json(output, rows)
    print(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
