"""Ingest real passages twice with a model of the 135M Llama shape, then answer questions.

    python benchmarks/real_passages.py --corpus corpus.jsonl.gz --questions nq_rag.jsonl.gz

Each line of the corpus is ``{"title", "text"}``; the questions have the format of ``eval --data``.
The weights are random, which affects answers but not speed or size. The script prints a JSON object
with the throughput and size of the first ingestion, the number of tokens computed in the second,
and the median time to first token in block and full mode, alternating between the modes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring import machine
from random_models import random_llama

from blockattn_rag import BlockAttentionEngine, DirectoryStore, Passage
from blockattn_rag.lab.evaluation.datasets import EvaluationSample, read_samples
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.formats import CHAT


def read_passages(path: Path, limit: int | None = None) -> list[Passage]:
    """Return the passages of a corpus."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines][:limit]
    return [Passage(r["title"], r["text"]) for r in records]


def read_corpus(path: Path, limit: int | None) -> list[Block]:
    """Return the passages of a corpus as blocks in the chat format."""
    passages = read_passages(path, limit)
    return [Block(CHAT.canonical_text(one), CHAT.template) for one in passages]


def ask(engine: BlockAttentionEngine, sample: EvaluationSample, mode: Any) -> Any:
    passages = [Passage(p.title, p.text) for p in sample.passages]
    prompt = CHAT.prompt(sample.question, passages, engine.model.tokenizer.tokenizer)
    # An option of transformers' `generate` disables the reuse of tails (`engine.tails`), so that
    # the timed question is computed although the warm-up asked the same one.
    return engine.generate(prompt, mode=mode, max_new_tokens=1, do_sample=False).stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--num-questions", type=int, default=10)
    parser.add_argument("--limit", type=int, help="number of passages to ingest; default: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="135m")
    options = parser.parse_args()

    tokenizer = load_tokenizer("bundled")
    model = random_llama(options.shape, max_tokens=16384, dtype=options.dtype)
    blocks = read_corpus(options.corpus, options.limit)
    samples = read_samples(options.questions, limit=options.num_questions)
    with tempfile.TemporaryDirectory() as folder:
        engine = BlockAttentionEngine.from_pretrained(
            model, tokenizer=tokenizer, store=DirectoryStore(folder)
        )
        first = engine.precompute(blocks, show_progress=True)
        second = engine.precompute(blocks)
        # Warm up by encoding the system block.
        prompts = [ask(engine, sample, "block") for sample in samples]
        pairs = [(ask(engine, s, "block"), ask(engine, s, "full")) for s in samples]
        size = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    block = statistics.median(b.ttft_s for b, _ in pairs)
    full = statistics.median(f.ttft_s for _, f in pairs)
    report = {
        "machine": machine(),
        "shape": options.shape,
        "dtype": options.dtype,
        "passages": len(blocks),
        "first_ingestion": asdict(first),
        "tokens_per_s": first.computed_tokens / first.seconds,
        "bytes_on_disk": size,
        "second_ingestion": asdict(second),
        "passage_misses_when_first_asked": sum(p.misses for p in prompts) - 1,
        "questions": len(pairs),
        "misses": sum(b.misses for b, _ in pairs),
        "prompt_tokens_median": statistics.median(f.prompt_tokens for _, f in pairs),
        "ttft_block_s": block,
        "ttft_full_s": full,
        "full_over_block": full / block,
        "fetch_s": statistics.median(b.fetch_s for b, _ in pairs),
        "assemble_s": statistics.median(b.assemble_s for b, _ in pairs),
        "prefill_s": statistics.median(b.prefill_s for b, _ in pairs),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
