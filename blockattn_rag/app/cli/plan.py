"""``blockattn-rag plan``: what a collection's keys and values take, and what they save."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.app.cli.figures import count, duration, size
from blockattn_rag.app.cli.output import JsonOption, KVDtypeHelp, KVDtypeName, emit, table, working
from blockattn_rag.app.rag.model_names import existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.lab.planning import Machine, Plan, Tier

GIB = 1 << 30


def plan(
    passages: Annotated[int, typer.Option(min=1, help="Passages in the collection.")],
    model: Annotated[
        str,
        typer.Option(
            help="Model name or folder (only its config is read), or a shape: 135m, 1b, 8b.",
            callback=existing_model,
        ),
    ] = "bundled",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a passage.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, help="Passages in a prompt.")] = 10,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 50,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of keys and values; if not given, float32 on a CPU, on a GPU the model's own."
        ),
    ] = None,
    kv_dtype: Annotated[KVDtypeName, typer.Option(help=KVDtypeHelp)] = "model",
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="GiB of the GPU's memory; without, CPU alone.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0, help="GiB of main memory; this machine's if not given.")
    ] = None,
    disk: Annotated[
        float | None, typer.Option(min=0, help="GiB on disk; what is free here if not given.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(min=0, help="Speed in 10^12 operations a second; measured if not given."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0, help="GB/s of the device's own memory; 10 (CPU), 2000 (GPU)."),
    ] = None,
    transfer: Annotated[float, typer.Option(min=0, help="GB/s from memory to GPU.")] = 25.0,
    disk_speed: Annotated[float, typer.Option(min=0, help="GB/s from disk.")] = 2.0,
    network: Annotated[
        float | None,
        typer.Option(min=0, help="GB/s from a shared store, such as S3; 1.2 is 10 Gbit/s."),
    ] = None,
    latency: Annotated[
        float, typer.Option(min=0, help="Milliseconds until the first byte comes from there.")
    ] = 100.0,
    as_json: JsonOption = False,
) -> None:
    """Storage, ingestion time and time to first token of a collection, from a config alone."""
    with working(as_json):
        import torch

        from blockattn_rag.lab.planning import Machine, measured_operations_per_s
        from blockattn_rag.lab.planning import plan as make_plan

        for option, value in (
            ("--tflops", tflops), ("--bandwidth", bandwidth),
            ("--transfer", transfer), ("--disk-speed", disk_speed), ("--network", network),
        ):  # fmt: skip
            if value == 0:
                raise typer.BadParameter("must be above 0", param_hint=option)
        on_gpu = gpu_memory is not None
        config, kind = _config(model, dtype, on_gpu=on_gpu)
        if tflops is None and on_gpu and not torch.cuda.is_available():
            raise ValueError(
                "--gpu-memory was given, but no GPU is here to measure: add --tflops with what "
                "it reaches in practice (some 600 for an H100 in bfloat16, 100 for an RTX 4090)"
            )
        device, usual = ("cuda", 2000.0) if on_gpu else ("cpu", 10.0)
        machine = Machine(
            memory_bytes=_memory_here() if memory is None else int(memory * GIB),
            disk_bytes=shutil.disk_usage(Path.cwd()).free if disk is None else int(disk * GIB),
            gpu_bytes=None if gpu_memory is None else int(gpu_memory * GIB),
            operations_per_s=1e12 * tflops if tflops else measured_operations_per_s(kind, device),
            device_bytes_per_s=1e9 * (bandwidth or usual),
            transfer_bytes_per_s=transfer * 1e9,
            disk_bytes_per_s=disk_speed * 1e9,
            network_bytes_per_s=None if network is None else network * 1e9,
            network_latency_s=latency / 1e3,
        )
        counts = {"passages": passages, "passage_tokens": tokens, "top_k": top_k}
        found = make_plan(
            config,
            kind,
            machine,
            **counts,
            question_tokens=question_tokens,
            kv_dtype=kv_dtype,
        )
    settings = {
        "model": model,
        "dtype": str(kind).removeprefix("torch."),
        "kv_dtype": kv_dtype,
        "passages": passages,
    }
    emit(as_json, {**settings, **asdict(found)}, *_shown(settings, found, machine))


def _config(model: str, dtype: str | None, *, on_gpu: bool) -> tuple[Any, Any]:
    """The config of a model or shape, and the type of its keys and values as it will be loaded."""
    import torch

    from blockattn_rag.lab.efficiency.shapes import SHAPES, floating_type, shape_config
    from blockattn_rag.model.loading import load_config

    try:
        with loading(model):
            config = shape_config(model) if model in SHAPES else load_config(model)
    except OSError as error:
        raise ValueError(f"{model!r} is no shape ({', '.join(SHAPES)}): {error}") from error
    if dtype:
        return config, floating_type(dtype)
    return config, (config.dtype or torch.bfloat16) if on_gpu else torch.float32


def _memory_here() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        raise ValueError("this system does not tell its memory: add --memory") from None


def _shown(settings: dict[str, Any], found: Plan, machine: Machine) -> list[Any]:
    passages = settings["passages"]
    rows = [
        (
            tier.name,
            f"{tier.passages:,}",
            "all" if tier.passages >= passages else f"{tier.passages / passages:.0%}",
            duration(tier.ttft_s) if tier.passages else "does not fit",
            _gain(found, tier) if tier.passages else "-",
        )
        for tier in found.tiers
    ]
    title = f"{count(passages, 'passage')}, {settings['model']}, {settings['dtype']}"
    if settings["kv_dtype"] != "model":
        title += f", blocks in {settings['kv_dtype']}"
    columns = ("blocks in", "room for", "of yours", "first token", "against full prefill")
    return [
        table(title, columns, rows),
        f"A passage takes {size(found.passage_bytes)}, all take {size(found.total_bytes)} "
        f"({size(found.footprint.bytes_per_token)} a token); encoding all takes "
        f"{duration(found.ingest_s)}. Full prefill: {duration(found.full_ttft_s)}.",
        _break_even(found),
        f"Estimated at {machine.operations_per_s / 1e12:.2f} * 10^12 operations/s, "
        f"{machine.device_bytes_per_s / 1e9:.0f} GB/s of the device's memory, "
        f"{machine.transfer_bytes_per_s / 1e9:.0f} GB/s to a GPU, "
        f"{machine.disk_bytes_per_s / 1e9:.1f} GB/s from disk; `blockattn-rag bench` measures.",
    ]


def _gain(found: Plan, tier: Tier) -> str:
    gain = f"{found.full_ttft_s / tier.ttft_s:.1f} x"
    return gain if tier.pays else f"{gain}: slower than computing"


def _break_even(found: Plan) -> str:
    speed = found.break_even_bytes_per_s
    if speed is None:
        return "Computing is faster than reuse here, wherever the blocks lie."
    return f"A store that is read at less than {speed / 1e9:.2f} GB/s is slower than computing."
