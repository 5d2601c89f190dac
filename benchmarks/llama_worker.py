"""Worker process of ``llama_cpp_beside.py`` that runs llama.cpp. Needs only ``llama-cpp-python``.

    python llama_worker.py MODEL.gguf --threads 1

Each input line is ``{"tokens": [...], "new_tokens": 32, "cached": false}``. The reply is
``{"ttft_s", "total_s", "answer", "memory_bytes", "peak_bytes"}``. ``cached``: whether to reuse the
common prefix with the previous prompt (llama.cpp's prompt cache).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path


def main() -> None:
    import llama_cpp

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args()
    model = llama_cpp.Llama(
        options.model,
        n_ctx=options.context,
        n_batch=512,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if not request["cached"]:
            model.reset()
        started = time.perf_counter()
        tokens = model.generate(request["tokens"], temp=0.0)
        answer = [next(tokens)]
        ttft_s = time.perf_counter() - started
        answer += islice(tokens, request["new_tokens"] - 1)
        total_s = time.perf_counter() - started
        reply = {"ttft_s": ttft_s, "total_s": total_s, "answer": answer, **memory()}
        print(json.dumps(reply), flush=True)


def memory() -> dict[str, int]:
    """Return the current and peak resident memory in bytes, including memory-mapped model files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    sizes = {name: int(value.split()[0]) << 10 for name, _, value in map(_field, lines)
             if name in ("VmRSS", "VmHWM")}  # fmt: skip
    return {"memory_bytes": sizes["VmRSS"], "peak_bytes": sizes["VmHWM"]}


def _field(line: str) -> tuple[str, str, str]:
    return line.partition(":")


if __name__ == "__main__":
    main()
