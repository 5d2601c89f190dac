"""``blockattn-rag plan``: storage and times of a collection or a trace, from a model's config."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.app.cli.options import KVDtypeOption, PlotOption, check_plot
from blockattn_rag.app.cli.output import count, duration, emit, percent, size, table
from blockattn_rag.app.cli.progress import progress
from blockattn_rag.app.rag.names import existing_model

if TYPE_CHECKING:
    from blockattn_rag.lab.planning import Machine, Plan, Tier
    from blockattn_rag.lab.replay import Outcome

GIB = 1 << 30
_DEVICE_BYTES_PER_S = {"cpu": 10e9, "cuda": 2e12}
"""Memory bandwidths of a typical machine and of a data centre GPU."""


_OF_A_COLLECTION = ("passages", "tokens", "top_k", "network")
_OF_A_TRACE = ("room", "plot")


def plan(
    context: typer.Context,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Passages in the collection.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Log of requests to replay, .jsonl or .jsonl.gz, one request per line: "
            '{"segments": [{"id": "...", "tokens": 123, "kind": "passage"}, ...]}, with segments '
            "in prompt order, the question last."
        ),
    ] = None,
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
            help="Type of keys and values. Default: float32 on a CPU, the model's own on a GPU."
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
    network: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of a shared store such as S3, in GB/s. Default: no shared store."
        ),
    ] = None,
    room: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --trace: also replay the trace with caches of this size in GiB.",
        ),
    ] = None,
    plot: PlotOption = None,
) -> None:
    """Estimate storage, ingestion time and time to first token from a model's config.

    No weights are needed. The estimate assumes the free disk space of this machine, 25 GB/s from
    memory to a GPU, 2 GB/s from disk, and 0.1 s to the first byte of a shared store.
    """
    for option, value in (("--tflops", tflops), ("--network", network)):
        if value is not None and value <= 0:
            raise typer.BadParameter(f"found {value:g}, expected above 0", param_hint=option)
    _check_subject(context, passages, trace)
    check_plot(plot)
    config, kind = _config(model, dtype, on_gpu=gpu_memory is not None)
    machine = _machine(kind, gpu_memory, memory, tflops, network)
    settings: dict[str, Any] = {
        "model": model,
        "dtype": str(kind).removeprefix("torch."),
        "kv_dtype": kv_dtype,
    }
    if trace is not None:
        rooms = [None] if room is None else [None, int(room * GIB)]
        requests, outcomes = _replayed(trace, config, kind, kv_dtype, machine, rooms, plot)
        settings |= {"requests": requests}
        data = {"outcomes": [asdict(one) for one in outcomes], "machine": asdict(machine)}
        emit({**settings, **data}, *_shown_outcomes(settings, outcomes, machine))
        return
    from blockattn_rag.lab.planning import plan as make_plan

    assert passages is not None  # checked above
    found = make_plan(
        config,
        kind,
        machine,
        passages=passages,
        passage_tokens=tokens,
        top_k=top_k,
        kv_dtype=kv_dtype,
    )
    settings |= {"passages": passages}
    emit({**settings, **asdict(found)}, *_shown(settings, found, machine))


def _check_subject(context: typer.Context, passages: int | None, trace: Path | None) -> None:
    """Require --passages or --trace, and refuse options that belong to the other one."""
    if passages is None and trace is None:
        raise typer.BadParameter("found neither --passages nor --trace, expected one of them")
    kind, others = ("--passages", _OF_A_TRACE) if trace is None else ("--trace", _OF_A_COLLECTION)
    for name in others:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"cannot be combined with {kind}", param_hint=option)


def _machine(
    dtype: Any,
    gpu_memory: float | None,
    memory: float | None,
    tflops: float | None,
    network: float | None,
) -> Machine:
    """The machine to plan for. Unset options are measured on this machine."""
    import psutil
    import torch

    from blockattn_rag.lab.planning import Machine, measured_operations_per_s

    on_gpu = gpu_memory is not None
    device = "cuda" if on_gpu else "cpu"
    if tflops is None and on_gpu and not torch.cuda.is_available():
        raise ValueError(
            "found --gpu-memory, but no GPU to measure: also pass --tflops, the speed that the GPU "
            "reaches in practice (about 600 for an H100 in bfloat16, 100 for an RTX 4090)"
        )
    return Machine(
        memory_bytes=psutil.virtual_memory().total if memory is None else int(memory * GIB),
        disk_bytes=shutil.disk_usage(Path.cwd()).free,
        gpu_bytes=None if gpu_memory is None else int(gpu_memory * GIB),
        operations_per_s=1e12 * tflops if tflops else measured_operations_per_s(dtype, device),
        device_bytes_per_s=_DEVICE_BYTES_PER_S[device],
        network_bytes_per_s=None if network is None else network * 1e9,
    )


def _replayed(
    trace: Path,
    config: Any,
    dtype: Any,
    kv_dtype: Any,
    machine: Machine,
    rooms: Sequence[int | None],
    file: Path | None,
) -> tuple[int, list[Outcome]]:
    """Replay a trace under all policies. Returns the number of requests, and the outcomes."""
    from blockattn_rag.lab.planning import footprint
    from blockattn_rag.lab.replay import LABELS, ReplayClock, plot_rooms, replay
    from blockattn_rag.lab.trace import read_trace

    requests = read_trace(trace)
    config = config.get_text_config(decoder=True)
    clock = ReplayClock(config, footprint(config, dtype, kv_dtype), machine)
    runs = [(policy, room) for room in rooms for policy in LABELS if policy != "full" or not room]
    outcomes = []
    with progress("replaying") as tick:
        for i, (policy, room) in enumerate(runs, 1):
            outcomes.append(replay(requests, policy, clock, room))
            tick(i, len(runs))
    if file is not None:
        plot_rooms(requests, clock, file)
    return len(requests), outcomes


def _config(model: str, dtype: str | None, *, on_gpu: bool) -> tuple[Any, Any]:
    """The config of a model or shape, and the type of its keys and values when it is loaded."""
    import torch

    from blockattn_rag.lab.efficiency.shapes import SHAPES, floating_type, shape_config
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
    title = _title(count(passages, "passage"), settings)
    columns = ("blocks in", "capacity", "of yours", "first token", "against full prefill")
    return [
        table(title, columns, rows),
        f"Storage: {size(found.passage_bytes)} per passage, {size(found.total_bytes)} in all "
        f"({size(found.footprint.bytes_per_token)} per token). Encoding all: "
        f"{duration(found.ingest_s)}. Full prefill: {duration(found.full_ttft_s)}.",
        _break_even(found),
        _assumed(machine),
    ]


def _shown_outcomes(
    settings: dict[str, Any], outcomes: Sequence[Outcome], machine: Machine
) -> list[Any]:
    from blockattn_rag.lab.replay import LABELS

    rows = [
        (
            LABELS[one.policy],
            "no limit" if one.room_bytes is None else size(one.room_bytes),
            percent(one.passage_hits),
            percent(one.hits),
            f"{one.computed_tokens:,.0f}",
            size(one.read_bytes),
            duration(one.ttft_s),
            duration(one.ttft_p95_s),
        )
        for one in outcomes
    ]
    title = _title(count(settings["requests"], "request"), settings)
    columns = ("", "room", "% of passages", "% of all", "computed", "read", "first token", "p95")
    lines = [
        table(title, columns, rows, left=(0, 1)),
        "Shares of tokens reused; tokens computed and bytes of blocks read per request; modelled "
        "times to first token, median and 95th percentile.",
        _assumed(machine),
    ]
    if any(one.from_disk for one in outcomes):
        lines.insert(2, "Blocks without a limit exceed the memory: they are read from disk.")
    return lines


def _title(subject: str, settings: dict[str, Any]) -> str:
    kv_dtype = settings["kv_dtype"]
    blocks = "" if kv_dtype == "model" else f", blocks in {kv_dtype}"
    return f"{subject}, {settings['model']}, {settings['dtype']}{blocks}"


def _assumed(machine: Machine) -> str:
    return (
        f"Estimated at {machine.operations_per_s / 1e12:.2f} * 10^12 operations/s, "
        f"{machine.device_bytes_per_s / 1e9:.0f} GB/s of the device's memory, "
        f"{machine.transfer_bytes_per_s / 1e9:.0f} GB/s to a GPU, "
        f"{machine.disk_bytes_per_s / 1e9:.1f} GB/s from disk; `blockattn-rag bench` measures."
    )


def _gain(found: Plan, tier: Tier) -> str:
    gain = f"{found.full_ttft_s / tier.ttft_s:.1f} x"
    return gain if tier.pays else f"{gain}: slower than computing"


def _break_even(found: Plan) -> str:
    speed = found.break_even_bytes_per_s
    if speed is None:
        return "Computing is faster than reuse here, wherever the blocks are stored."
    return f"Below {speed / 1e9:.2f} GB/s, reading a store is slower than computing."
