"""Measure accuracy and time to first token in vLLM, with and without recomputed tokens.

    python benchmarks/served_recompute.py qwen --nq nq_rag.jsonl.gz --minutes 30

The questions are those of `benchmarks/quality`, in the same order. A vLLM engine in float32 answers
each question in three modes: full mode with vLLM's prefix caching, with stored passages, and with
stored passages of which a share of the tokens is recomputed. The order of the modes varies between
questions. Encoding passages is not timed. Times are CPU seconds of the engine's worker, which has
one thread, because CPU time depends less on other load. The script appends each question to a CSV
file, and resumes where it stopped. The table also compares the answers with those of an in-process
engine (`benchmarks/results/quality`). Run the script in the environment of `make test-vllm`.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent / "quality"))

import psutil
import sets
import torch
import typer
from models import model_path
from records import measure, read
from rows import FULL, Record
from serving_load import ENVIRONMENT
from sets import Item
from tables import markdown

from blockattn_rag.lab.evaluation.metrics import bootstrap_mean
from blockattn_rag.model.loading import load_tokenizer, resolve_name
from blockattn_rag.prompts.blocks import STORED
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.keys import block_keys
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.vllm.openai import Prompts
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine, sampling_of

RESULTS = Path(__file__).parent / "results"
PAGE_TOKENS = 32
"""Smallest page size of vLLM on a CPU, which gives prefix caching the most hits."""
STORED_ROW, RECOMPUTED = "stored passages", "recomputed"
STORE = Path.home() / ".cache" / "blockattn_rag" / "served_recompute"
IN_PROCESS = "head, 10 % recomputed"
_WRITTEN_S = 60


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the engine."""

    token_ids: list[int]
    ttft_s: float
    cached_tokens: int
    recomputed_tokens: int


class Served:
    """vLLM with the connector, which answers questions in all rows."""

    def __init__(self, model: str, recipe: str, store: Path, tokens: int) -> None:
        config = ServingConfig(store=str(store), recipe=recipe, memory="2GiB")
        self._profile, _ = config.profile_of(model, torch.float32)
        self._store, self._tokens = DirectoryStore(store), tokens
        self._tokenizer = load_tokenizer(model)
        self._prompts = Prompts(self._tokenizer)
        options = {"store": str(store), "recipe": recipe, "memory": "2GiB"}
        self._engine = Engine(options, model=model, block_size=PAGE_TOKENS, max_model_len=4096)
        # The worker: a thread of this process, or a process (VLLM_ENABLE_V1_MULTIPROCESSING).
        own = psutil.Process()
        workers = [one for one in own.children(recursive=True) if "Worker" in one.cmdline()[0]]
        self._worker = workers[0] if workers else own
        self._turn = self._requests = 0

    def answer(self, item: Item, rows: Sequence[str]) -> Iterator[Record]:
        """Answer a question in each of the rows."""
        tokenizer = self._tokenizer
        prompt = self._prompts.token_ids(
            CHAT.prompt(item.question, item.passages, tokenizer), "block"
        )
        keep = (STORED,) * len(prompt.lengths)
        plan = BlockPlan("complete", prompt.lengths, keep=keep, fixed=prompt.fixed)
        self._encode(prompt.token_ids, plan)
        none = replace(plan, fixed=tuple(range(len(plan.lengths))))
        params: Mapping[str, dict[str, Any] | None] = {
            FULL: None,
            STORED_ROW: none.to_dict(),
            RECOMPUTED: plan.to_dict(),
        }
        names, self._turn = [*params], self._turn + 1
        for place in range(len(names)):
            row = names[(place + self._turn) % len(names)]
            reply = self._reply(prompt.token_ids, params[row])
            output = tokenizer.decode(reply.token_ids, skip_special_tokens=True)
            total = len(prompt.token_ids)
            yield Record(
                item.set,
                item.id,
                row,
                int(item.is_right(output)),
                item.f1(output),
                math.nan,
                math.nan,
                total - reply.cached_tokens + reply.recomputed_tokens,
                total,
                round(reply.ttft_s, 4),
                output,
            )

    def _encode(self, token_ids: Sequence[int], plan: BlockPlan) -> None:
        """Encode and store the blocks of a prompt."""
        missing = []
        for block in block_keys(token_ids, plan, self._profile):
            if block.key not in self._store:
                opens = block.place == 0
                sink = () if opens else self._profile.sink_ids
                encode = BlockPlan("encode", (len(block.ids),), keep=(STORED,), opens_prompt=opens)
                missing.append(([*sink, *block.ids], encode.to_dict()))
        self._engine.ask_all(missing, max_tokens=1)
        until = time.monotonic() + _WRITTEN_S
        for block in block_keys(token_ids, plan, self._profile):
            while block.key not in self._store:
                if time.monotonic() > until:
                    raise RuntimeError(f"Block {block.place} was not stored")
                self._engine.ask([0], max_tokens=1)  # Run more steps, in which blocks are saved.

    def _reply(self, ids: list[int], params: dict[str, Any] | None) -> Reply:
        engine, started, first = self._engine.llm.llm_engine, self._cpu_s(), None
        sampling = sampling_of(params, max_tokens=self._tokens, min_tokens=0)
        self._requests += 1
        engine.add_request(str(self._requests), {"prompt_token_ids": ids}, sampling)
        while True:
            for output in engine.step():
                if first is None and output.outputs[0].token_ids:
                    first = self._cpu_s() - started
                if output.finished and first is not None:
                    report = (output.kv_transfer_params or {}).get("blockattn", {})
                    return Reply(
                        list(output.outputs[0].token_ids),
                        first,
                        output.num_cached_tokens or 0,
                        sum(report.get("recomputed", ())),
                    )

    def _cpu_s(self) -> float:
        times = self._worker.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self._engine.close()


def table(records: Sequence[Record], in_process: Mapping[tuple[str, str, str], str]) -> str:
    """Format all rows as a Markdown table."""
    by_row: dict[str, dict[tuple[str, str], Record]] = {}
    for record in records:
        by_row.setdefault(record.row, {})[record.set, record.id] = record
    full, lines = by_row[FULL], []
    for name in (FULL, STORED_ROW, RECOMPUTED):
        rows = by_row[name]
        kept = [one.right for key, one in rows.items() if full[key].right]
        gains = [100 * (one.right - full[key].right) for key, one in rows.items()]
        change = "{:+.0f} ({:+.0f} to {:+.0f})".format(*bootstrap_mean(gains))
        sooner = statistics.median(full[key].ttft_s / one.ttft_s for key, one in rows.items())
        shares = [one.computed_tokens / one.prompt_tokens for one in rows.values()]
        known = [(one, in_process.get((*key, name))) for key, one in rows.items()]
        same = [one.output == other for one, other in known if other is not None]
        lines.append(
            (
                name,
                f"{sum(one.right for one in rows.values())} of {len(rows)}",
                change if name != FULL else "",
                f"{sum(kept)} of {len(kept)}",
                f"{100 * statistics.fmean(shares):.0f} %",
                f"{statistics.median(one.ttft_s for one in rows.values()):.2f} s",
                f"{sooner:.1f}",
                f"{sum(same)} of {len(same)}" if same else "",
            )
        )
    head = ("", "right", "difference in points (95 %)", "kept of full mode's", "computed")
    head += ("first token", "times sooner", "same answer as in process")
    return markdown(head, lines)


def _in_process(path: Path, row: str) -> dict[tuple[str, str, str], str]:
    """Return the answers of an in-process engine."""
    rows = {FULL: FULL, row: RECOMPUTED}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            (line["set"], line["id"], rows[line["row"]]): line["output"]
            for line in csv.DictReader(file)
            if line["row"] in rows
        }


def main(
    model: Annotated[str, typer.Argument(help="smollm2, qwen, gemma, or another model.")] = "qwen",
    nq: Annotated[Path | None, typer.Option(help="File of Natural Questions.")] = None,
    recipe: str = "head+recompute:0.1",
    questions: int = 40,
    minutes: float = 30,
    tokens: int = 40,
    store: Path = STORE,
    row: Annotated[str, typer.Option(help="Row of the in-process results.")] = IN_PROCESS,
) -> None:
    os.environ |= ENVIRONMENT  # for the processes that vLLM starts
    path = RESULTS / f"served-recompute-{model}.csv"
    found = [sets.facts(), sets.comparisons(), sets.pairs(), sets.order()]
    if nq is not None:
        found += [sets.natural_questions(nq, count) for count in (5, 10)]
    items = sets.mixed(found)[:questions]
    done = {(one.set, one.id) for one in read(path, Record)}
    if minutes and any((item.set, item.id) not in done for item in items):
        served = Served(resolve_name(model_path(model)), recipe, store / model, tokens)
        measure(path, Record, items, served.answer, [FULL, STORED_ROW, RECOMPUTED], minutes)
        served.close()
    known = _in_process(RESULTS / "quality" / f"{model}.csv", row)
    text = table([*read(path, Record)], known)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
