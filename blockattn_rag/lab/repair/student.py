"""Student: the model in block mode with a correction, its blocks, and its training.

Training processes one prompt at a time, and accumulates gradients over a batch. Real batches would
save little: on SmolLM2, a batch of four prompts takes 15 % less time, not counting padding. The
teacher and the encoding of passages take most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockattn_rag.engine.fetcher import BlockFetcher
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv import BlockKV, Context, place
from blockattn_rag.lab.repair.teacher import Teacher, answer_loss, divergence
from blockattn_rag.lab.trainer import LabTrainer, training_arguments
from blockattn_rag.lab.work import last_checkpoint
from blockattn_rag.model import BlockModel
from blockattn_rag.model.caches import isolated_caches
from blockattn_rag.model.correction import Correction, LayerCorrection
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store import DirectoryStore, KVStore
from blockattn_rag.store.namespaces import Access

# Settings from experiments with SmolLM2 and Natural Questions (docs/guides/stock_models.md). They
# are constants, because users cannot choose better values without such experiments.
BATCH = 4
LEARNING_RATE = 1e-4
_WARM_UP_SHARE = 0.1
_ADAM_BETA2 = 0.98

_BIAS_UNIT = 20.0
"""Unit in which biases are trained. They are much larger than weights, but Adam steps are equal."""


class ReadThroughStore(DirectoryStore):
    """Store in a folder that reads missing blocks from another store, the lender, if there is one.
    A repair can thus use the blocks of a database without adding any to it. Int8 blocks are not
    read from the lender, because an adapter must not be fitted to quantized blocks."""

    def __init__(self, path: Path, max_bytes: int, lender: KVStore | None) -> None:
        # Blocks are not flushed to disk, because lost blocks are simply encoded again.
        super().__init__(path, max_bytes=max_bytes, fsync=False)
        self._lender = lender

    def get(self, key: str) -> BlockKV | None:
        kv = super().get(key)
        if kv is not None or self._lender is None:
            return kv
        lent = self._lender.get(key)
        return lent if lent is not None and lent.scales is None else None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None


class ReadyPrompt(NamedTuple):
    """Prompt in block mode: its placed blocks, and the token ids of the final block."""

    context: Context
    final_ids: list[int]


class BlockSource:
    """Function that prepares prompts for block mode. Blocks come from a store. Missing blocks are
    encoded with a sink but without a correction, and stored."""

    def __init__(self, model: BlockModel, store: KVStore, sink: str, namespace: str = "") -> None:
        self._model = model
        self._fetcher = BlockFetcher(model, store, access=Access(namespace))
        self._recipe = Recipe(sink)

    def __call__(self, prompt: BlockPrompt) -> ReadyPrompt:
        context, final_ids = self._model.tokenizer.with_final_ids(prompt)
        specs = self._fetcher.specs(context, as_prompt=True, recipe=self._recipe)
        blocks = self._fetcher.fetch(specs).blocks
        return ReadyPrompt(place(blocks), final_ids)


class Student(nn.Module):
    """Module that predicts known answers in block mode, and is differentiable in the correction.

    Its only parameters are the correction's. The model is not a submodule, so its weights, which
    must be frozen, are not trained, moved or saved with the module.
    """

    def __init__(self, model: BlockModel, correction: Correction) -> None:
        super().__init__()
        self.model, self._start = model, correction
        pairs = ((layer.weight, layer.bias / _BIAS_UNIT) for layer in correction.layers)
        tensors = (tensor for pair in pairs for tensor in pair)
        self.trained = nn.ParameterList(tensor.to(model.device, copy=True) for tensor in tensors)

    @property
    def correction(self) -> Correction:
        tensors = iter(self.trained)
        layers = (
            LayerCorrection(weight, bias * _BIAS_UNIT)
            for weight, bias in zip(tensors, tensors, strict=True)
        )
        return replace(self._start, layers=tuple(layers))

    def finished(self) -> Correction:
        """Return the current correction, on the CPU and without gradients."""
        current = self.correction
        layers = [[t.detach().cpu().clone() for t in layer] for layer in current.layers]
        return replace(current, layers=tuple(LayerCorrection(*layer) for layer in layers))

    def forward(self, ready: ReadyPrompt, answer_ids: Sequence[int]) -> Tensor:
        """Logits ``[answer tokens, vocab]``. The first row predicts the first answer token."""
        model, correction = self.model, self.correction
        first, *others = ready.context.blocks
        layouts = model.profile.layouts
        moved = (b._replace(kv=correction.applied(b.kv, layouts)) for b in others)
        input_ids = torch.tensor([[*ready.final_ids, *answer_ids[:-1]]], device=model.device)
        with model.lock, isolated_caches():
            out = model.hf_model(
                input_ids=input_ids,
                past_key_values=model.cache_for(Context((first, *moved)), assembly="copy"),
                use_cache=True,
                **logits_to_keep(model.hf_model, len(answer_ids)),
            )
        logits: Tensor = out.logits[0, -len(answer_ids) :]
        return logits


def correction_loss(
    student: Student, teacher: Teacher, source: BlockSource, prompt: BlockPrompt
) -> Tensor:
    """Divergence of a student from the teacher over the teacher's answer to a prompt."""
    answer = teacher(prompt)
    logits = student(source(prompt), answer.ids.tolist())
    return answer_loss(divergence(answer.predictions, logits))


def train_correction(
    student: Student,
    loss: Callable[[BlockPrompt], Tensor],
    folder: Path,
    train: Sequence[BlockPrompt],
    held: Sequence[BlockPrompt],
    *,
    max_steps: int,
    eval_steps: int,
    on_progress: Callable[[int, int], None],
    time_is_up: Callable[[], bool],
) -> list[dict[str, float]]:
    """Train a student, which ends in the state with the lowest loss on ``held``. Returns all
    losses. Resumes from the last checkpoint in ``folder``."""
    checkpoint = last_checkpoint(folder)
    arguments = training_arguments(
        folder,
        batch_size=1,
        gradient_accumulation_steps=BATCH,
        max_steps=max_steps,
        learning_rate=LEARNING_RATE,
        warmup_steps=round(_WARM_UP_SHARE * max_steps),
        adam_beta2=_ADAM_BETA2,
        eval_strategy="steps",
        eval_steps=eval_steps,
        eval_on_start=checkpoint is None,
        save_strategy="steps",
        save_steps=eval_steps,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, eval_steps // 5),
        disable_tqdm=True,
        seed=0,
        use_cpu=student.model.device.type == "cpu",
    )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"Found {arguments.n_gpu} GPUs, expected one: make only one visible "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
    trainer = LabTrainer(
        model=student,
        args=arguments,
        loss=lambda _, batch: (loss(batch["prompt"]), 1),
        train_dataset=list(train),
        eval_dataset=list(held),
        data_collator=lambda batch: {"prompt": batch[0]},
        on_progress=on_progress,
        time_is_up=time_is_up,
    )
    trainer.train_from(checkpoint)
    return trainer.history
