"""Block fine-tuning of a model on JSON lines: one call, one result folder.

The result is an ordinary transformers model (or peft adapter) that answers in block and full mode.
Several GPUs: start the same script by ``accelerate launch``; FSDP and DeepSpeed come from its
configuration.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from transformers import PrinterCallback, TrainingArguments

from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import DataError
from blockattn_rag.files import write_json
from blockattn_rag.lab.training import work
from blockattn_rag.lab.training.batches import Collator, ModeDataset
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.data import DataReport, SampleEncoder, read_samples
from blockattn_rag.lab.training.masks import ModelMasks
from blockattn_rag.lab.training.model import load_model, token_limit
from blockattn_rag.lab.training.report import FinetuneReport, write_card, write_plot
from blockattn_rag.lab.training.trainer import BlockTrainer, Watch
from blockattn_rag.model.gguf import SMOLLM2, is_gguf
from blockattn_rag.model.loading import BUNDLED, SIDECAR, load_tokenizer
from blockattn_rag.prompts.sinks import sink_ids

logger = logging.getLogger("blockattn_rag")

# Settings that TrainingArguments has under the same names.
_SAME_NAMES = (
    *("learning_rate", "warmup_steps", "weight_decay", "adam_beta2", "max_grad_norm"),
    *("bf16", "logging_steps", "save_steps", "seed"),
)


def finetune(config: FinetuneConfig) -> FinetuneReport:
    """Fine-tune a model as ``config`` says and write it to ``config.output``.

    Raises:
        FileExistsError: ``output`` exists, or an interrupted run does, and neither ``resume`` nor
            ``overwrite`` was asked for; or ``overwrite`` would replace what is no earlier result.
        DataError: a bad line, with file and number; or block mode is to be trained, and no sample
            has a context.
        DivergedError: a loss or weights are not finite.
        UnsupportedModelError: the model cannot be run in block mode exactly.
        ValueError: settings that do not fit together, or with the interrupted run.
    """
    arguments = _arguments(config)
    settings, process = work.check_folders(config), PartialState()
    process.wait_for_everyone()  # every process has checked before one writes
    with work.work_folder(config, settings) if process.is_main_process else nullcontext():
        return _run(config, arguments)


def _run(config: FinetuneConfig, arguments: TrainingArguments) -> FinetuneReport:
    tokenizer = load_tokenizer(config.model)
    model = load_model(config)
    encoder = SampleEncoder(
        tokenizer,
        prompt=config.prompt_format,
        blocks_per_turn=config.blocks_per_turn,
        max_tokens=token_limit(config, model),
    )
    with arguments.main_process_first(local=False):
        train, train_report = _encoded(config.train_data, "train", encoder, config)
        held, eval_report = _encoded(config.eval_data, "eval", encoder, config)
    if "block" in config.modes:
        _check_context(train_report)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sink = sink_ids(config.sink, encoder.tokenizer)
    train_items = ModeDataset(train, config.modes, config.context_loss_weight, sink)
    held_items = {m: ModeDataset(held, [m], sink=sink) for m in config.modes} if len(held) else None
    trainer = _trainer(config, arguments, model, pad or 0, train_items, held_items)
    checkpoint = work.last_checkpoint(config.work / work.CHECKPOINTS) if config.resume else None
    started = time.monotonic()
    trainer.train_from(checkpoint)
    ended = trainer.state.global_step
    evaluated = [e["step"] for e in _history(trainer.state.log_history) if "loss" not in e]
    if trainer.eval_dataset and ended not in evaluated:
        trainer.evaluate()
    history = _history(trainer.state.log_history)
    report = FinetuneReport(
        output=Path(config.output),
        steps=ended,
        seconds=time.monotonic() - started,
        loss=next(e["loss"] for e in reversed(history) if "loss" in e),
        train=train_report,
        evaluation=eval_report,
        history=history,
    )
    _publish(config, trainer, tokenizer, report)
    return report


def _encoded(
    files: Sequence[str | Path], name: str, encoder: SampleEncoder, config: FinetuneConfig
) -> tuple[Any, DataReport]:
    """The files' samples as a memory-mapped ``datasets.Dataset``; written by one process."""
    path, report = config.work / f"{name}.arrow", DataReport()
    listing = path.with_suffix(".json")
    if not files:
        return [], report
    if PartialState().is_main_process:
        with ArrowWriter(path=str(path)) as writer:
            for sample in read_samples(files, encoder, on_error=config.on_error, report=report):
                writer.write(dataclasses.asdict(sample))
            if not report.samples:
                raise DataError(f"found no usable sample in {', '.join(map(str, files))}")
            writer.finalize()
        write_json(listing, dataclasses.asdict(report))
    return Dataset.from_file(str(path)), DataReport(**json.loads(listing.read_text("utf-8")))


def _check_context(report: DataReport) -> None:
    """Raises ``DataError`` if no sample has a block before the final one: block mode is then the
    same as full mode, and nothing is learned about it."""
    if not report.with_context:
        raise DataError(
            "no sample has a context: each is a question and its answer in one block, which is "
            "alike in block and full mode. Give passages or blocks; or cut turns of messages "
            "(blocks_per_turn, --blocks-per-turn); or train full mode alone (modes, --modes full)"
        )
    if report.with_context < report.samples / 2:
        logger.warning(
            "only %d of %d samples have a context: the others are alike in block and full mode",
            report.with_context,
            report.samples,
        )


def _arguments(config: FinetuneConfig) -> TrainingArguments:
    """The trainer's settings; ``batch_size`` is reached by accumulation."""
    arguments = TrainingArguments(
        output_dir=str(config.work / work.CHECKPOINTS),
        per_device_train_batch_size=config.per_device_batch_size,
        per_device_eval_batch_size=config.per_device_batch_size,
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        lr_scheduler_type=config.lr_scheduler,
        eval_strategy="steps" if config.eval_data and config.eval_steps else "no",
        eval_steps=config.eval_steps or None,
        eval_on_start=bool(config.eval_data),
        logging_nan_inf_filter=False,
        save_total_limit=2,
        disable_tqdm=not config.progress,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to=[],
        use_cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    )
    shared = config.per_device_batch_size * arguments.world_size
    if config.batch_size % shared:
        raise ValueError(
            f"batch_size is {config.batch_size}, expected a multiple of {shared} (per-device batch "
            "size x number of devices)"
        )
    arguments.gradient_accumulation_steps = config.batch_size // shared
    return arguments


def _trainer(
    config: FinetuneConfig,
    args: TrainingArguments,
    model: Any,
    pad: int,
    train: ModeDataset,
    held: dict[Mode, ModeDataset] | None,
) -> BlockTrainer:
    trainer = BlockTrainer(
        model=model,
        args=args,
        train_dataset=train,
        data_collator=Collator(pad, config.positions, config.packing),
        callbacks=[Watch()],
        masks=ModelMasks(model.config, model.config._attn_implementation),
        lengths=train.token_counts() if config.group_by_length else None,
        eval_dataset=held,
    )
    if not config.progress:
        trainer.remove_callback(PrinterCallback)
    return trainer


def _history(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """The log without the Trainer's summaries; one entry a step and kind, the latest."""
    kept: dict[tuple[float, bool], dict[str, float]] = {}
    for entry in log:
        losses = {k: v for k, v in entry.items() if k == "loss" or k.startswith("eval_")}
        if losses:
            kept[entry["step"], "loss" in entry] = {"step": entry["step"], **losses}
    return list(kept.values())


def _publish(
    config: FinetuneConfig, trainer: BlockTrainer, tokenizer: Any, report: FinetuneReport
) -> None:
    """Write model, tokenizer, log, plot and card beside the output, then rename."""
    staging = config.work / "result"
    if trainer.is_world_process_zero():
        shutil.rmtree(staging, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    model: Any = trainer.model
    trainer.check_finite()
    model.config.use_cache = True
    trainer.save_model(str(staging))
    trainer.accelerator.wait_for_everyone()
    if not trainer.is_world_process_zero():
        return
    (staging / "training_args.bin").unlink(missing_ok=True)  # a pickle, of no use to readers
    tokenizer.save_pretrained(staging)
    if config.lora:
        # An adapter names its base by path: that of a model of ours differs by machine, and that of
        # a GGUF file is a cache's.
        is_named = config.model in (BUNDLED, SMOLLM2)
        path = Path(config.model).expanduser()
        base = config.model if is_named else str(path.resolve()) if is_gguf(path) else None
        write_json(staging / SIDECAR, {**config.marker, **({"base_model": base} if base else {})})
    write_json(staging / work.LOG, report.history)
    write_plot(report.history, staging / "training_curves.png")
    write_card(config, report, staging / "README.md")
    work.replace_output(config, staging)
