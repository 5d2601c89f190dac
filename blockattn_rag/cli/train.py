"""``blockattn-rag train``: block fine-tuning of any supported model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.cli.output import JsonOption, ModelArgument, count, duration, emit, note, working
from blockattn_rag.rag.model_names import existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.training.config import LoraConfig
    from blockattn_rag.training.finetune import FinetuneReport


class OnError(StrEnum):
    """What a bad line of data does."""

    stop = "raise"
    skip = "skip"


_TASK, _RATE, _SPEED = "What is learned", "Optimizer and adapters", "Memory and speed"


def train(
    model: Annotated[str, typer.Option(help=ModelArgument, callback=existing_model)],
    data: Annotated[list[Path], typer.Option(help="Training data, JSON lines; may be repeated.")],
    output: Annotated[Path, typer.Option(help="Folder of the result; appears when complete.")],
    eval_data: Annotated[
        list[Path] | None, typer.Option(help="Data to evaluate on; may be repeated.")
    ] = None,
    modes: Annotated[
        str, typer.Option(help="block,full (the papers'), block or full.", rich_help_panel=_TASK)
    ] = "block,full",
    positions: Annotated[
        str, typer.Option(help="reordered, or composite (ablation).", rich_help_panel=_TASK)
    ] = "reordered",
    prompt_format: Annotated[
        str, typer.Option(help="chat, block-attention or turborag.", rich_help_panel=_TASK)
    ] = "chat",
    blocks_per_turn: Annotated[
        int,
        typer.Option(
            min=1,
            help='Of lines with "messages": most blocks of a turn; 1 keeps turns whole.',
            rich_help_panel=_TASK,
        ),
    ] = 1,
    context_loss_weight: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Loss weight of all but the answers.", rich_help_panel=_TASK
        ),
    ] = 0.0,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 1.0,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Instead of epochs.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-5,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of an optimizer step.")] = 64,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest sample.")] = None,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps of rising learning rate.", rich_help_panel=_RATE)
    ] = 20,
    lr_scheduler: Annotated[
        str, typer.Option(help="linear, cosine, constant, ...", rich_help_panel=_RATE)
    ] = "linear",
    weight_decay: Annotated[float, typer.Option(min=0, rich_help_panel=_RATE)] = 0.0,
    adam_beta2: Annotated[float, typer.Option(min=0, max=1, rich_help_panel=_RATE)] = 0.999,
    max_grad_norm: Annotated[
        float, typer.Option(min=0, help="Longer gradients are cut.", rich_help_panel=_RATE)
    ] = 1.0,
    lora: Annotated[
        bool,
        typer.Option(
            "--lora", help="Train low-rank adapters, not all weights.", rich_help_panel=_RATE
        ),
    ] = False,
    lora_rank: Annotated[
        int | None, typer.Option(help="Of the adapters; 16.", rich_help_panel=_RATE)
    ] = None,
    lora_alpha: Annotated[
        int | None,
        typer.Option(help="Of the adapters; twice the rank.", rich_help_panel=_RATE),
    ] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(help="Of the adapters; 0.", rich_help_panel=_RATE)
    ] = None,
    lora_target: Annotated[
        list[str] | None,
        typer.Option(help="Layers with adapters; repeatable; all-linear.", rich_help_panel=_RATE),
    ] = None,
    per_device_batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of one forward pass.", rich_help_panel=_SPEED)
    ] = 1,
    packing: Annotated[
        bool, typer.Option("--packing", help="Several samples a row.", rich_help_panel=_SPEED)
    ] = False,
    group_by_length: Annotated[
        bool,
        typer.Option(help="Batches of samples of about one length.", rich_help_panel=_SPEED),
    ] = True,
    attention: Annotated[
        str, typer.Option(help="auto, eager, sdpa, flex_attention.", rich_help_panel=_SPEED)
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights.", rich_help_panel=_SPEED)] = "float32",
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16.", rich_help_panel=_SPEED)
    ] = False,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Trade time for memory.", rich_help_panel=_SPEED
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    eval_steps: Annotated[
        int, typer.Option(min=0, help="Evaluate that often; 0: at start and end.")
    ] = 0,
    logging_steps: Annotated[int, typer.Option(min=1, help="Steps between reports of loss.")] = 10,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave them in OUTPUT.work at the end.")
    ] = False,
    on_error: Annotated[OnError, typer.Option(help="Stop at a bad line, or leave it out.")] = (
        OnError.stop
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier result.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show how far it is.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model so that it answers in block mode as well as in full mode.

    Data: JSON lines with "messages"; with "prompt", "blocks", "response"; or with "question",
    "passages", "answer". The defaults are the papers'. For several GPUs: `accelerate launch -m
    blockattn_rag train ...`.
    """
    # The options are named as the settings are.
    options: dict[str, Any] = dict(locals())
    as_json = options.pop("as_json")
    with working(as_json):
        from blockattn_rag.training.config import FinetuneConfig
        from blockattn_rag.training.finetune import finetune

        config = FinetuneConfig(
            train_data=options.pop("data"),
            eval_data=options.pop("eval_data") or (),
            modes=tuple(mode.strip() for mode in options.pop("modes").split(",")),
            on_error=options.pop("on_error").value,
            lora=_adapters(options),
            **options,
        )
        with loading(model):
            report = finetune(config)
    _show(report, as_json, adapters=config.lora is not None)


def _adapters(options: dict[str, Any]) -> LoraConfig | None:
    """Take the options of adapters out of ``options``; None where none are wanted."""
    from blockattn_rag.training.config import LoraConfig

    wanted, targets = options.pop("lora"), options.pop("lora_target")
    given = {name: options.pop(f"lora_{name}") for name in ("rank", "alpha", "dropout")}
    given["target_modules"] = None if targets in (None, ["all-linear"]) else tuple(targets)
    given = {name: value for name, value in given.items() if value is not None}
    if wanted:
        return LoraConfig(**{"alpha": 2 * given.get("rank", LoraConfig().rank), **given})
    if given or targets:
        raise ValueError("the adapters' options need --lora: without it, all weights are trained")
    return None


def _show(report: FinetuneReport, as_json: bool, *, adapters: bool) -> None:
    skipped = [*report.train.skipped, *report.evaluation.skipped]
    for reason in skipped:
        note(f"left out: {reason}")
    data = {
        "output": str(report.output),
        "steps": report.steps,
        "seconds": report.seconds,
        "loss": report.loss,
        "eval_losses": {
            mode: {"before": before, "after": after}
            for mode, (before, after) in report.eval_losses.items()
        },
        "skipped": skipped,
        "history": report.history,
    }
    what = "adapter" if adapters else "model"
    emit(
        as_json,
        data,
        f"The {what} is in {report.output}. Measure it: blockattn-rag eval --model {report.output} "
        "--data FILE",
        f"{count(report.steps, 'step')} in {duration(report.seconds)}; training loss over the last "
        f"logged steps: {report.loss:.4f}.",
        _evaluation(report),
    )


def _evaluation(report: FinetuneReport) -> str:
    if not report.eval_losses:
        return "No evaluation data were given (--eval-data), so the losses by mode are not known."
    losses = (
        f"{mode} mode {before:.4f} before, {after:.4f} after"
        for mode, (before, after) in report.eval_losses.items()
    )
    return f"Loss on the answers of the evaluation data: {'; '.join(losses)}."
