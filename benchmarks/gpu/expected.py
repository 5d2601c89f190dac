"""Print expected and measured times on an H100, as Markdown.

python benchmarks/gpu/expected.py > benchmarks/results/gpu/expected.md

An expected time is the larger of two quotients: bytes read and written divided by the bandwidth,
and operations divided by the compute rate. The device's rates were measured by ``first_token``;
transfer rates are the defaults of ``blockattn-rag plan``. Kernel launches, attention scores and
host work are ignored, so real times can only be longer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))
from first_token import LENGTHS, PATHS, QUESTION_TOKENS, RECOMPUTE, SHAPES, path_limit_s
from harness import Ceilings, Record, results_of
from report import table
from shared_prompt import BATCHES, CONTEXT_TOKENS, FINAL_TOKENS, NEW_TOKENS, SYSTEM_TOKENS

from blockattn_rag.app.cli.output import duration
from blockattn_rag.lab.planning import Machine, footprint, prefill_flops, shape_config

RESULTS = Path(__file__).parents[1] / "results" / "gpu"


class Expected(NamedTuple):
    """An expected and a measured time in seconds."""

    shape: str
    context: int
    what: str
    expected_s: float
    measured_s: float | None


def expectations(results: Mapping[str, Record]) -> Iterator[Expected]:
    """Yield the expected times for all shapes and contexts of the campaign.

    Args:
        results: Results of ``first_token``, by case.
    """
    ceilings = Ceilings(**next(row["ceilings"] for row in results.values() if "ceilings" in row))
    machine = Machine(0, 0)
    for shape in SHAPES:
        config: Any = shape_config(shape)
        sizes = footprint(config, torch.bfloat16)
        token = sizes.bytes_per_token
        # A forward pass reads all weights except the input embeddings.
        weights = sizes.weight_bytes - 2 * config.vocab_size * config.hidden_size

        def measured(length: int, case: str, key: str, shape: str = shape) -> float | None:
            return results.get(f"{shape}/{length}/{case}", {}).get(key)

        for length in sorted(LENGTHS):
            for path in (*PATHS, "floor"):
                limit = path_limit_s(config, weights, token, ceilings, path, length)
                found = measured(length, "forward", f"{path}_s")
                yield Expected(shape, length, f"first token, {path}", limit, found)
            # On average, recomputed tokens attend to half of the context.
            new = int(RECOMPUTE * length) + QUESTION_TOKENS
            flops_s = prefill_flops(config, new, (length - new) // 2) / ceilings.flops_per_s
            read_s = (weights + length * token) / ceilings.bytes_per_s
            found = measured(length, "recompute", "recompute_s")
            what = "first token, a tenth recomputed"
            yield Expected(shape, length, what, max(flops_s, read_s), found)
            yield Expected(
                shape, length, "further token, relay", read_s, measured(length, "decode", "relay_s")
            )
            moved_s = 2 * length * token / ceilings.bytes_per_s
            found = measured(length, "assembly", "assembly_s")
            yield Expected(shape, length, "assembly, a part of copy", moved_s, found)
            for tier, rate in (
                ("main memory", machine.transfer_bytes_per_s),
                ("disk", machine.disk_bytes_per_s),
            ):
                loaded_s = length * token / rate
                yield Expected(shape, length, f"blocks from {tier}", loaded_s, None)
        for batch in BATCHES:
            own = batch * (CONTEXT_TOKENS + FINAL_TOKENS + NEW_TOKENS / 2)
            shared = SYSTEM_TOKENS + own
            for what, keys in (("apart", batch * SYSTEM_TOKENS + own), ("shared", shared)):
                step_s = (weights + token * keys) / ceilings.bytes_per_s
                name = f"step of {batch} requests, system prompt {what}"
                yield Expected(shape, SYSTEM_TOKENS, name, step_s, None)


def main() -> None:
    results = results_of([RESULTS], "first_token")
    rows = [
        (
            *(one.shape, f"{one.context:,}", one.what, duration(one.expected_s)),
            *(duration(one.measured_s), quotient(one)),
        )
        for one in expectations(results)
    ]
    heads = ("shape", "context", "what", "expected", "measured", "measured / expected")
    print("\n".join(table(heads, rows)).rstrip())


def quotient(one: Expected) -> str:
    return "-" if one.measured_s is None else f"{one.measured_s / one.expected_s:.1f}"


if __name__ == "__main__":
    main()
