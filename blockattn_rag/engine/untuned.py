"""The warning that a model's answers in block mode will be worse than in full mode."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakSet

from blockattn_rag.engine.calibration import Calibration
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.checkpoints import other_switches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("blockattn_rag")

# Models whose users were told: once for all engines over one.
_warned_of: WeakSet[PreTrainedModel] = WeakSet()


def warn_if_untuned(
    model: BlockModel,
    prompt: BlockPrompt,
    options: GenerateOptions,
    calibration: Calibration | None,
    uncalibrated: str,
    kv_dtype: KVDtype,
) -> None:
    """Tell, once a model, that a prompt is about to be answered in block mode by a model that was
    not trained for it, as far as is known, and that no calibration vouches for.

    Args:
        calibration: of the model and the store, if there is one.
        uncalibrated: why there is none, where one was found that is not for this model.
        kv_dtype: what the engine keeps blocks in.
    """
    if model.hf_model in _warned_of:
        return
    checkpoint, (positions, sink) = model.checkpoint, (options.positions, options.sink)
    if checkpoint:
        unmet = checkpoint.unmet(positions, sink)
    else:
        found = {"positions": positions, "sink": sink}
        unmet = other_switches(model.name, model.tuned_with, found)
    if model.is_block_tuned and not unmet:
        return
    doubt = calibration.doubt(options, prompt, kv_dtype) if calibration else uncalibrated
    if calibration and not doubt and not unmet:
        return
    _warned_of.add(model.hf_model)
    if unmet:
        logger.warning(unmet)
        return
    logger.warning(
        "%s is not known to be block-fine-tuned: in block mode its answers will be less accurate "
        "than in full mode (the papers measured 48 against 68 points without fine-tuning). "
        "%sChoose settings and measure what is left by `blockattn-rag calibrate`, train a reader "
        "by `blockattn-rag adapt`, or use mode='full'.",
        model.name,
        f"{doubt} ".lstrip(),
    )
