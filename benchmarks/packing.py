"""Measure the time of a linear layer with plain and packed weights, by number of input rows.

    python benchmarks/packing.py > benchmarks/results/packing.json

The results determine for how many rows blockattn_rag/model/packing.py uses packed weights.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from measuring import machine
from torch import Tensor, nn

from blockattn_rag.model.packing import pack_linears

WIDTHS = ((576, 1536), (1536, 576), (2048, 2048), (2048, 8192))
ROWS = (1, 2, 4, 8, 16, 50, 64, 128, 255)
LAYERS = 12  # enough to exceed the processor's cache, as in a real model


def median_s(run: Callable[[], object], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def through(
    layers: list[nn.Linear], weights: Callable[[nn.Linear, Tensor], Tensor], x: Tensor
) -> float:
    return median_s(lambda: [weights(layer, x) for layer in layers]) / len(layers)


@torch.inference_mode()
def measure() -> list[dict[str, float]]:
    """Measure the seconds per layer, plain and packed, for each shape and number of rows."""
    rows = []
    for width_in, width_out in WIDTHS:
        with torch.inference_mode(False):
            layers = [nn.Linear(width_in, width_out, bias=False) for _ in range(LAYERS)]
            for layer in layers:
                if not pack_linears(layer):
                    raise SystemExit("PyTorch cannot pack weights here: run this on an x86 CPU")
        for count in ROWS:
            x = torch.randn(1, count, width_in)
            plain = through(layers, lambda layer, x: nn.functional.linear(x, layer.weight), x)
            packed = through(layers, lambda layer, x: layer.forward.product(x), x)
            row = {"in": width_in, "out": width_out, "rows": count}
            rows.append(row | {"plain_s": plain, "packed_s": packed, "gain": plain / packed})
    return rows


if __name__ == "__main__":
    cpu = torch.device("cpu")
    about = {"model": "one layer of each", "dtype": "float32", "device": "cpu"}
    print(json.dumps({**about, "machine": machine(cpu), "rows": measure()}, indent=2))
