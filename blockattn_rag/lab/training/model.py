"""Loading the model to train."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from blockattn_rag.lab.training.config import FinetuneConfig, LoraConfig
from blockattn_rag.lazy import missing_extra
from blockattn_rag.model.loading import resolve_name
from blockattn_rag.model.probe import profile_attention


def load_model(config: FinetuneConfig) -> Any:
    """The model to train: its attention checked, its config marked as block-tuned, and with LoRA
    adapters if ``config.lora`` asks for them.

    Raises:
        ImportError: adapters are asked for, and peft is not installed.
        UnsupportedModelError: the model cannot be run in block mode exactly.
        ValueError: the model is an adapter, or lacks layers or attention that are asked for.
    """
    name = resolve_name(config.model)
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # adapters name their base by this path
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(f"{name} is a LoRA adapter; merge it into its base before training on")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=config.dtype)
    profile_attention(model)
    _set_attention(model, config)
    if config.gradient_checkpointing:
        # The method is renamed on the way to transformers 6.
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if "block" in config.modes:
        model.config.block_attention = config.marker
    elif hasattr(model.config, "block_attention"):
        del model.config.block_attention  # training in full mode alone may undo the block tuning
    return _with_adapters(model, config.lora, config.seed) if config.lora else model


def _set_attention(model: Any, config: FinetuneConfig) -> None:
    """The attention implementation asked for, or the best that the model has here."""
    on_gpu = torch.cuda.is_available()
    if config.attention == "flex_attention" and not on_gpu:
        raise ValueError("flex_attention has no backward pass but on CUDA; use 'sdpa' or 'eager'")
    if config.attention != "auto":
        model.set_attn_implementation(config.attention)
        return
    # With a mask and gradients, plain matrix products beat SDPA on CPUs.
    for candidate in ("flex_attention", "sdpa") if on_gpu else ():
        with contextlib.suppress(ValueError):  # this architecture lacks it
            model.set_attn_implementation(candidate)
            return
    model.set_attn_implementation("eager")


def _with_adapters(model: Any, lora: LoraConfig, seed: int) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"LoRA needs {missing_extra('peft', 'train')}") from error
    targets = lora.target_modules
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    if not isinstance(targets, str):
        ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        if unknown := sorted(t for t in targets if t.rpartition(".")[2] not in ends):
            raise ValueError(f"the model has no layers {', '.join(unknown)} to adapt")
    torch.manual_seed(seed)
    return peft.get_peft_model(model, settings)


def token_limit(config: FinetuneConfig, model: Any) -> int | None:
    """The most tokens of a sample; None where neither the settings nor the model limit them.

    Raises:
        ValueError: ``config.max_tokens`` is more than the model holds.
    """
    wanted, limit = config.max_tokens, getattr(model.config, "max_position_embeddings", None)
    if wanted is not None and limit is not None and wanted > limit:
        raise ValueError(f"max_tokens is {wanted}, but the model holds {limit} tokens")
    return limit if wanted is None else wanted
