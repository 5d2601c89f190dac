"""``blockattn-rag plan``: estimate storage, memory and times from a model's config."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag.app.cli.options import KVDtypeOption
from blockattn_rag.app.cli.output import count, duration, emit, size, table
from blockattn_rag.app.rag.names import existing_model

GIB = 1 << 30
_DEVICE_BYTES_PER_S = {"cpu": 10e9, "cuda": 2e12}
"""Memory bandwidth of a typical CPU and of a data-center GPU, in bytes per second."""


def plan(
    passages: Annotated[int, typer.Option(min=1, help="Number of passages in the collection.")],
    model: Annotated[
        str,
        typer.Option(
            help="Model name or folder (only its config is read), or a Llama shape: 135m, 1b, 8b.",
            callback=existing_model,
        ),
    ] = "bundled",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per passage.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, help="Passages per prompt.")] = 10,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the model. Default: float32 on a CPU, the checkpoint's on a GPU."
        ),
    ] = None,
    kv_dtype: KVDtypeOption = "model",
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="GPU memory in GiB. Default: no GPU.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0, help="Main memory in GiB. Default: this machine's.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            help="Speed in 10^12 operations per second. Default: measured on this machine."
        ),
    ] = None,
) -> None:
    """Estimate storage, ingestion time and time to first token from a model's config.

    No weights are needed. The estimate uses the free space of the current folder's disk, and
    assumes 25 GB/s from host memory to a GPU, and 2 GB/s from disk.
    """
    if tflops is not None and tflops <= 0:
        raise typer.BadParameter(f"Found {tflops:g}, expected more than 0", param_hint="--tflops")
    import psutil
    import torch

    from blockattn_rag.lab.planning import Machine, measured_operations_per_s, plan_capacity

    on_gpu = gpu_memory is not None
    device = "cuda" if on_gpu else "cpu"
    config, kind = _config(model, dtype, on_gpu=on_gpu)
    if tflops is None and on_gpu and not torch.cuda.is_available():
        raise ValueError(
            "--gpu-memory was passed, but there is no GPU to measure: also pass --tflops, the "
            "GPU's speed in practice (about 600 for an H100 in bfloat16, 100 for an RTX 4090)."
        )
    machine = Machine(
        memory_bytes=psutil.virtual_memory().total if memory is None else int(memory * GIB),
        disk_bytes=shutil.disk_usage(Path.cwd()).free,
        gpu_bytes=None if gpu_memory is None else int(gpu_memory * GIB),
        operations_per_s=1e12 * tflops if tflops else measured_operations_per_s(kind, device),
        device_bytes_per_s=_DEVICE_BYTES_PER_S[device],
    )
    estimate = plan_capacity(
        config, kind, machine,
        passages=passages, passage_tokens=tokens, top_k=top_k, kv_dtype=kv_dtype,
    )  # fmt: skip
    settings = {"model": model, "dtype": str(kind).removeprefix("torch."), "kv_dtype": kv_dtype}
    data = {**settings, "passages": passages, **asdict(estimate), "machine": asdict(machine)}
    blocks = "" if kv_dtype == "model" else f", blocks in {kv_dtype}"
    title = f"{count(passages, 'passage')}, {model}, {settings['dtype']}{blocks}"
    columns = ("blocks in", "capacity", "of yours", "first token", "against full prefill")
    rows = []
    for tier in estimate.tiers:
        share = "all" if tier.passages >= passages else f"{tier.passages / passages:.0%}"
        first, gain = "does not fit", "-"
        if tier.passages:
            first, gain = duration(tier.ttft_s), f"{estimate.full_ttft_s / tier.ttft_s:.1f} x"
            if tier.ttft_s >= estimate.full_ttft_s:
                gain += ": slower than full prefill"
        rows.append((tier.name, f"{tier.passages:,}", share, first, gain))
    speed = estimate.break_even_bytes_per_s
    emit(
        data,
        table(title, columns, rows),
        f"Storage: {size(estimate.passage_bytes)} per passage, {size(estimate.total_bytes)} in all "
        f"({size(estimate.footprint.bytes_per_token)} per token). Encoding all: "
        f"{duration(estimate.ingest_s)}. Full prefill: {duration(estimate.full_ttft_s)}.",
        "A full prefill is faster than reuse here, wherever the blocks are stored."
        if speed is None
        else f"Below {size(speed)}/s, reading from a store is slower than a full prefill.",
        f"Estimated at {machine.operations_per_s / 1e12:.2f} * 10^12 operations/s, "
        f"{machine.device_bytes_per_s / 1e9:.0f} GB/s of the device's memory, "
        f"{machine.transfer_bytes_per_s / 1e9:.0f} GB/s to a GPU, "
        f"{machine.disk_bytes_per_s / 1e9:.1f} GB/s from disk.",
    )


def _config(model: str, dtype: str | None, *, on_gpu: bool) -> tuple[Any, Any]:
    import torch

    from blockattn_rag.lab.planning import SHAPES, floating_type, shape_config
    from blockattn_rag.model.loading import load_config

    try:
        config = shape_config(model) if model in SHAPES else load_config(model)
    except OSError as error:
        raise ValueError(
            f"{model!r} is neither a model nor one of the shapes {', '.join(SHAPES)}: {error}"
        ) from error
    if dtype:
        return config, floating_type(dtype)
    return config, (config.dtype or torch.bfloat16) if on_gpu else torch.float32
