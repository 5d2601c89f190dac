"""Measure the memory and time to first token of a model by weight type, on the CPU.

    python benchmarks/weight_types.py > benchmarks/results/weight-types.json
    python benchmarks/weight_types.py 1b > benchmarks/results/weight-types-1b.json
    python benchmarks/weight_types.py 8b --dtypes nf4,int8 --repeats 1 \
        > benchmarks/results/weight-types-8b.json

Types are measured one after another, each in a separate process with its own peak memory. The
prompt has four passages of 128 tokens and a question. It is answered in full mode, and in block
mode with stored passages. The default model is Qwen2.5-Coder-0.5B (``benchmarks/models.py``, extras
gguf and quantized). ``1b`` and ``8b`` are Llamas with random weights in bfloat16, which are written
to the user's cache folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
from measuring import in_turns, machine
from models import CACHE, model_path
from random_models import counting_tokenizer, random_llama

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.lab.planning import SHAPES

DTYPES = ("float32", "bfloat16", "int8", "nf4")
PASSAGES, PASSAGE_TOKENS, QUESTION_TOKENS = 4, 128, 24


def measure(model: str, dtype: str, repeats: int) -> dict[str, Any]:
    """Measure one type, and return its row. Memory is in bytes; the peak includes mapped files."""
    process = psutil.Process()
    before = _own(process)
    started = time.perf_counter()
    engine: BlockAttentionEngine = BlockAttentionEngine.from_pretrained(
        model, device="cpu", dtype=dtype, recipe="none"
    )
    load_s = time.perf_counter() - started
    prompt = [_text(engine, PASSAGE_TOKENS, number) for number in range(PASSAGES)]
    prompt.append(_text(engine, QUESTION_TOKENS, PASSAGES))

    def first_token(mode: Any) -> float:
        return engine.generate(prompt, mode=mode, max_new_tokens=1).stats.ttft_s

    ways = {"full": lambda: first_token("full"), "block": lambda: first_token("block")}
    row = {"dtype": dtype, "load_s": load_s, **in_turns(ways, repeats)}
    started = time.perf_counter()
    answer = engine.generate([*prompt[:-1], prompt[-1] + " Continue:"], max_new_tokens=9)
    decode_s = (answer.stats.total_s - answer.stats.ttft_s) / max(1, len(answer.token_ids) - 1)
    return {
        **row,
        "decode_s": decode_s,
        "kv_bytes_per_token": engine.model.bytes_per_token,
        "own_bytes": _own(process) - before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _own(process: psutil.Process) -> int:
    """Return the memory of a process in bytes, without memory-mapped files."""
    info: Any = process.memory_info()
    return int(info.rss - info.shared)


def _text(engine: BlockAttentionEngine, tokens: int, seed: int) -> str:
    """Return text with about ``tokens`` tokens."""
    words = [f"t{100 * seed + number % 97}" for number in range(tokens)]
    tokenizer = engine.model.tokenizer.tokenizer
    ids = tokenizer(" ".join(words), add_special_tokens=False).input_ids[:tokens]
    return str(tokenizer.decode(ids))


def _random_model(shape: str) -> str:
    """Return the folder of a Llama with random weights, and create it if it is missing."""
    folder = CACHE.with_name("random_models") / shape
    if not folder.exists():
        model = random_llama(shape, max_tokens=4096, device="cpu", dtype="bfloat16")
        unfinished = folder.with_suffix(".unfinished")
        model.save_pretrained(unfinished)
        counting_tokenizer(SHAPES[shape]["vocab_size"]).save_pretrained(unfinished)
        unfinished.rename(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen")
    parser.add_argument("--dtype", choices=DTYPES, help="Measure this type in this process.")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="Types to measure.")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.model in SHAPES:
        # Run in a separate process, so that its memory is returned to the system.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            model = pool.submit(_random_model, options.model).result()
    else:
        model = model_path(options.model)
    if options.dtype:
        print(json.dumps(measure(model, options.dtype, options.repeats)))
        return
    rows = []
    for dtype in options.dtypes.split(","):
        command = [sys.executable, __file__, model, "--dtype", dtype]
        command += ["--repeats", str(options.repeats)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(rows[-1], file=sys.stderr)
    print(json.dumps({"machine": machine(), "model": options.model, "rows": rows}))


if __name__ == "__main__":
    main()
