"""Block fine-tuning of a model on JSON Lines data.

The result is an ordinary transformers model (or peft adapter) for the modes it was trained in. On
several GPUs, run the script with ``accelerate launch``, whose config can select FSDP or DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from transformers import TrainingArguments

from blockattn_rag.errors import DataError, UnsupportedModelError
from blockattn_rag.files import write_json
from blockattn_rag.lab import work
from blockattn_rag.lab.json_lines import require_file
from blockattn_rag.lab.trainer import LabTrainer, training_arguments
from blockattn_rag.lab.training.batches import Collator, ModeDataset, ModelMasks, batch_loss
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.data import DataReport, SampleEncoder, read_training_samples
from blockattn_rag.lab.training.report import FinetuneReport, write_card, write_plot
from blockattn_rag.lazy import missing_extra
from blockattn_rag.model.gguf import SMOLLM2, is_gguf
from blockattn_rag.model.loading import (
    BUNDLED,
    SIDECAR,
    is_adapter,
    load_model,
    load_tokenizer,
    resolve_name,
)
from blockattn_rag.model.probe import profile_attention
from blockattn_rag.prompts.sinks import sink_ids

logger = logging.getLogger("blockattn_rag")

_LORA_SCALE = 2  # Ratio of lora_alpha to the rank. 2 is the usual value.
LOGGING_STEPS = 10
_LOG = "training_log.json"

# Settings with the same names in TrainingArguments.
_SAME_NAMES = ("learning_rate", "warmup_steps", "adam_beta2", "bf16", "save_steps", "seed")


def finetune(config: FinetuneConfig) -> FinetuneReport:
    """Fine-tune a model according to ``config``, and write it to ``config.output``.

    Raises:
        FileExistsError: ``output`` exists, or ``<output>.work`` is not a work folder. If ``output``
            was created during the run, the result stays in the work folder.
        DataError: A file is missing or empty, a line is invalid (the message contains file and
            line), ``modes`` includes block mode but no sample has a context, the interrupted run
            had other settings, or another run is using the work folder.
        DivergedError: A loss or the weights became NaN or infinite.
        UnsupportedModelError: The model cannot be trained in block mode.
        ValueError: ``batch_size`` does not suit the number of devices, or ``model`` is an adapter.
    """
    arguments = _arguments(config)
    settings, process = check_folders(config), PartialState()
    process.wait_for_everyone()  # All processes must check before any of them writes.
    folder = work.work_of(config.output)
    saved = folder / work.CHECKPOINTS
    opened = work.work_folder(folder, settings, lambda _: any(saved.glob("checkpoint-*")))
    with opened if process.is_main_process else nullcontext():
        return _run(config, folder, arguments)


def check_folders(config: FinetuneConfig) -> dict[str, Any]:
    """Check that the output does not exist, and that the work folder can be used. Returns the
    settings that affect the result, including digests of the data files."""
    settings = {
        **config.decisive(),
        "training data": [*map(_digest, config.train_data)],
        "evaluation data": [*map(_digest, config.eval_data)],
    }
    settings = json.loads(json.dumps(settings, default=str))
    work.check_resumable(work.work_of(config.output), settings)
    _check_output(Path(config.output))
    return settings


def _check_output(output: Path) -> None:
    if os.path.lexists(output):
        raise FileExistsError(f"{output} already exists; delete it, or choose another output")


def _digest(path: str | Path) -> str:
    require_file(Path(path))
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _arguments(config: FinetuneConfig) -> TrainingArguments:
    """Create the Trainer's arguments. Gradients are accumulated over ``batch_size`` items."""
    arguments = training_arguments(
        work.work_of(config.output) / work.CHECKPOINTS,
        batch_size=config.per_device_batch_size,
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        lr_scheduler_type=config.lr_scheduler,
        logging_steps=LOGGING_STEPS,
        eval_strategy="steps" if config.eval_data and config.eval_steps else "no",
        eval_steps=config.eval_steps or None,
        eval_on_start=bool(config.eval_data),
        disable_tqdm=not config.progress,
        label_names=["labels"],
        use_cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    )
    shared = config.per_device_batch_size * arguments.world_size
    if config.batch_size % shared:
        raise ValueError(
            f"Invalid batch_size {config.batch_size}: expected a multiple of {shared} (per-device "
            "batch size x number of devices)"
        )
    arguments.gradient_accumulation_steps = config.batch_size // shared
    return arguments


def _run(config: FinetuneConfig, folder: Path, arguments: TrainingArguments) -> FinetuneReport:
    tokenizer = load_tokenizer(config.model)
    model = _load_model(config)
    encoder = SampleEncoder(
        tokenizer,
        prompt=config.prompt_format,
        blocks_per_turn=config.blocks_per_turn,
        max_tokens=getattr(model.config, "max_position_embeddings", None),
    )
    with arguments.main_process_first(local=False):
        train = _encoded(config.train_data, folder / "train.arrow", encoder)
        held = _encoded(config.eval_data, folder / "eval.arrow", encoder)
    train_report = DataReport.of(train["block_lengths"])
    if "block" in config.modes:
        _check_context(train_report)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    how = (config.positions, sink_ids(config.sink, encoder.tokenizer))
    items = ModeDataset(train, config.modes, *how)
    masks = ModelMasks(model.config, model.config._attn_implementation)
    trainer = LabTrainer(
        model=model,
        args=arguments,
        loss=partial(batch_loss, masks, model.dtype),
        train_dataset=items,
        data_collator=Collator(pad or 0),
        lengths=items.token_counts(),
        eval_dataset={m: ModeDataset(held, [m], *how) for m in config.modes} if held else None,
    )
    started = time.monotonic()
    trainer.train_from(work.last_checkpoint(folder / work.CHECKPOINTS))
    report = FinetuneReport(
        output=Path(config.output),
        steps=trainer.state.global_step,
        seconds=time.monotonic() - started,
        loss=next(e["loss"] for e in reversed(trainer.history) if "loss" in e),
        train=train_report,
        history=trainer.history,
    )
    publish(config, folder, trainer, tokenizer, report)
    return report


def _load_model(config: FinetuneConfig) -> Any:
    """Load the model to train, with LoRA adapters if configured, and mark its config."""
    name = resolve_name(config.model)
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # Adapters refer to their base model by this path.
    if is_adapter(name):
        raise ValueError(
            f"{name} is a LoRA adapter; merge it into its base model, and train the merged model"
        )
    model: Any = load_model(name, device="cpu", dtype=torch.float32)
    if profile_attention(model).has_states and "block" in config.modes:
        raise UnsupportedModelError(
            f"{name} is a hybrid model, whose recurrent layers do not support a block mask: train "
            "it with modes=('full',), or use a model with only attention layers"
        )
    # With masks and gradients, eager attention is faster than SDPA on CPUs.
    model.set_attn_implementation("sdpa" if torch.cuda.is_available() else "eager")
    if config.gradient_checkpointing:
        # Transformers 6 renames ``gradient_checkpointing_enable``.
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if "block" in config.modes:
        model.config.block_attention = config.marker
    elif hasattr(model.config, "block_attention"):
        del model.config.block_attention  # Training only in full mode may undo block fine-tuning.
    return _with_adapters(model, config) if config.lora else model


def _with_adapters(model: Any, config: FinetuneConfig) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"LoRA needs {missing_extra('peft', 'train')}") from error
    adapters = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=_LORA_SCALE * config.lora_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    return peft.get_peft_model(model, adapters)


def _encoded(files: Sequence[str | Path], path: Path, encoder: SampleEncoder) -> Any:
    """Encode files as a memory-mapped ``datasets.Dataset``. Only the main process writes it."""
    if not files:
        return []
    if PartialState().is_main_process:
        with ArrowWriter(path=str(path)) as writer:
            is_empty = True
            for sample in read_training_samples(files, encoder):
                writer.write(dataclasses.asdict(sample))
                is_empty = False
            if is_empty:
                raise DataError(f"Found no sample in {', '.join(map(str, files))}")
            writer.finalize()
    return Dataset.from_file(str(path))


def _check_context(report: DataReport) -> None:
    if not report.with_context:
        raise DataError(
            "No sample has a context: each consists of a question and its answer in a single "
            "block, which is identical in block and full mode. Add passages or blocks, split turns "
            "of messages (blocks_per_turn, --blocks-per-turn), or train only in full mode "
            "(modes=('full',))"
        )
    if report.with_context < report.samples / 2:
        logger.warning(
            "Only %d of %d samples have a context: the others are identical in block and full mode",
            report.with_context,
            report.samples,
        )


def publish(
    config: FinetuneConfig,
    folder: Path,
    trainer: LabTrainer,
    tokenizer: Any,
    report: FinetuneReport,
) -> None:
    """Write model, tokenizer, log, plot and card to the work folder, then move them to output."""
    staging = folder / "result"
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
    # This file is a pickle, and not needed to load the model.
    (staging / "training_args.bin").unlink(missing_ok=True)
    tokenizer.save_pretrained(staging)
    if config.lora:
        write_json(staging / SIDECAR, {**config.marker, **_base_of_adapter(config.model)})
    write_json(staging / _LOG, report.history)
    write_plot(report.history, staging / "training_curves.png")
    write_card(config, report, staging / "README.md")
    # The safetensors library makes weights readable only by their owner. Give all files the mode of
    # the log, which was created with the default mode.
    mode = stat.S_IMODE((staging / _LOG).stat().st_mode)
    for path in staging.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    _check_output(Path(config.output))
    staging.rename(config.output)
    work.remove_work(folder)


def _base_of_adapter(model: str) -> dict[str, str]:
    """Return the ``base_model`` entry for an adapter's ``SIDECAR`` file: the short name of a model
    in a package, or the path of a GGUF file. For both, peft records an internal folder instead."""
    path = Path(model).expanduser()
    if model in (BUNDLED, SMOLLM2):
        return {"base_model": model}
    return {"base_model": str(path.resolve())} if is_gguf(path) else {}
