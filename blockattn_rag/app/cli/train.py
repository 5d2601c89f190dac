"""``blockattn-rag train``: block fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.app.cli.options import MODEL_HELP
from blockattn_rag.app.cli.output import count, duration, emit
from blockattn_rag.app.rag.names import existing_model


def train(
    model: Annotated[str, typer.Option(help=MODEL_HELP, callback=existing_model)],
    output: Annotated[Path, typer.Option(help="New folder for the result. Created at the end.")],
    data: Annotated[list[Path], typer.Option(help="Training data, JSON Lines. Repeatable.")],
    eval_data: Annotated[
        list[Path] | None, typer.Option(help="Evaluation data, JSON Lines. Repeatable.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-5,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples per optimizer step, counted once for each mode.")
    ] = 64,
    blocks_per_turn: Annotated[
        int, typer.Option(min=1, help='Maximum number of blocks per turn of "messages".')
    ] = 1,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train LoRA adapters instead of all weights.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 (autocast).")] = False,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Recompute activations in the backward pass, to save memory at the cost of time.",
        ),
    ] = False,
) -> None:
    """Fine-tune a model to answer in both block mode and full mode.

    Each line of the data is a JSON object with "messages", with "prompt", "blocks" and "response",
    or with "question", "passages" and "answer". Defaults follow the Block-Attention paper.
    FinetuneConfig in Python has more settings. Run the same command again to resume an interrupted
    run from its last checkpoint. On several GPUs, run `accelerate launch -m blockattn_rag train
    ...`.
    """
    from blockattn_rag.lab.training.config import FinetuneConfig
    from blockattn_rag.lab.training.finetune import finetune

    config = FinetuneConfig(
        model,
        output,
        data,
        eval_data=eval_data or (),
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        blocks_per_turn=blocks_per_turn,
        lora=lora,
        bf16=bf16,
        gradient_checkpointing=gradient_checkpointing,
    )
    report = finetune(config)
    losses = report.eval_losses.items()
    emit(
        {
            "output": report.output,
            "steps": report.steps,
            "seconds": report.seconds,
            "loss": report.loss,
            "eval_losses": {mode: {"before": old, "after": new} for mode, (old, new) in losses},
            "history": report.history,
        },
        f"The {'adapter' if lora else 'model'} is in {report.output}. Measure it: blockattn-rag "
        f"eval --model {report.output} --data FILE",
        f"{count(report.steps, 'step')} in {duration(report.seconds)}; training loss over the last "
        f"logged steps: {report.loss:.4f}.",
        report.evaluation_text
        if losses
        else "No evaluation: pass --eval-data to compare the loss in both modes.",
    )
