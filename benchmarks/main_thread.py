"""Measure the time of a forward pass while one or two threads have OpenMP workers.

    OMP_NUM_THREADS=2 python benchmarks/main_thread.py

The result explains why ``Scheduler.submit_and_wait`` runs an idle model in the main thread. If
there are more workers than cores, GNU OpenMP workers do not spin between operations, which slows
down every forward pass. Set OMP_NUM_THREADS to the number of cores.
"""

from __future__ import annotations

import json
import threading

import torch
from measuring import machine
from packing import median_s  # the script next to this one
from random_models import random_llama

TOKENS = 50


def main() -> None:
    model = random_llama("135m", max_tokens=TOKENS)
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))

    @torch.inference_mode()
    def forward() -> None:
        model(ids, use_cache=False, logits_to_keep=1)

    times = {"one_thread_s": median_s(forward)}
    other_has_computed, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        forward()
        other_has_computed.set()
        may_end.wait()

    other = threading.Thread(target=compute)
    other.start()
    other_has_computed.wait()
    times["beside_an_idle_thread_s"] = median_s(forward)
    may_end.set()
    other.join()
    times["after_its_end_s"] = median_s(forward)
    ratio = times["beside_an_idle_thread_s"] / times["one_thread_s"]
    print(json.dumps({"tokens": TOKENS, **times, "ratio": ratio, "machine": machine()}, indent=2))


if __name__ == "__main__":
    main()
