"""Entry point of a repair: checks the inputs and runs the stages."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.recipe_files import check_replaceable, read_fields
from blockattn_rag.errors import DataError
from blockattn_rag.lab import work
from blockattn_rag.lab.evaluation.collection import TOLERANCE
from blockattn_rag.lab.repair.data import Material
from blockattn_rag.lab.repair.plan import LIMITS, Limits, TooLittleTimeError
from blockattn_rag.lab.repair.stages import PLAN, QUESTIONS, Progress, Repair
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import Passage

_LENGTHS = 100
"""Minimum number of passages, if there are enough, from which the total tokens are estimated."""


def repair(
    model: BlockModel,
    material: Material,
    output: Path,
    *,
    minutes: float = 20.0,
    tolerance: float = TOLERANCE,
    version: str = "",
    limits: Limits = LIMITS,
    on_progress: Progress = lambda *_: None,
) -> Recipe:
    """Fit recipes to a model, and measure and save the cheapest recipe that is good enough.

    An interrupted run with the same inputs is resumed. The model's weights are frozen and not
    modified.

    Args:
        output: Folder for the recipe. An existing recipe in it is replaced.
        minutes: Time limit for the complete run. Resuming requires the same limit.
        tolerance: Fraction of full mode's answers that the recipe must keep: correct answers if
            enough questions have reference answers, else tokens. If no candidate keeps this
            fraction, the candidate that keeps the most is chosen.

    Returns:
        The recipe, with its report.

    Raises:
        DataError: There are too few questions or passages, the model is block-fine-tuned, the
            output contains other files or another model's recipe, an interrupted run had other
            inputs, or another run with this output is in progress.
        TooLittleTimeError: There is too little time. A subclass of DataError.
        DivergedError: A loss became NaN or infinite.
        ContextOverflowError: A prompt and its answer do not fit in the context window.
        OSError: The output cannot be written, or there is not enough disk space.
    """
    if model.is_block_tuned:
        raise DataError(
            f"{model.name} is block-fine-tuned and needs no recipe; measure it with "
            f"`blockattn-rag eval --model {model.name}`"
        )
    _check_output(output, model)
    folder = work.work_of(output)
    _check_disk(folder, model, material.passages, limits)
    inputs = {"model": f"{model.name} (fingerprint {model.fingerprint[:12]})", **material.inputs()}

    def is_worth_keeping(error: BaseException) -> bool:
        # After other DataErrors, the inputs must change, so generated questions cannot be reused.
        has_questions = (folder / QUESTIONS).is_file()
        may_resume = isinstance(error, TooLittleTimeError) or not isinstance(error, DataError)
        return (folder / PLAN).is_file() or (has_questions and may_resume)

    with work.work_folder(folder, inputs, is_worth_keeping):
        run = Repair(model, material, folder, 60 * minutes, limits, on_progress, tolerance)
        recipe, image = run.run(version)
        recipe.save(output, plot=image)
        work.remove_work(folder)
    return recipe


def _check_output(output: Path, model: BlockModel) -> None:
    """Check that the output can be written. It may be a folder that only contains a recipe for the
    model, which the run replaces."""
    try:
        check_replaceable(output)
    except ValueError as error:
        raise DataError(f"{str(error).rstrip('.')} (--output)") from error
    with suppress(ValueError):  # The folder contains no recipe, or a damaged one.
        earlier = read_fields(output)
        if earlier.fingerprints and model.fingerprint not in earlier.fingerprints:
            shown = ", ".join(owner[:12] for owner in earlier.fingerprints)
            raise DataError(
                f"{output} contains a recipe for {earlier.model} (fingerprints {shown}), expected "
                f"one for {model.name} (fingerprint {model.fingerprint[:12]}); choose another "
                "folder (--output), or delete that recipe"
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent):
        pass


def _check_disk(
    folder: Path, model: BlockModel, passages: Sequence[Passage], limits: Limits
) -> None:
    shown = passages[:: max(1, len(passages) // _LENGTHS)]
    ids = (model.tokenizer.final_ids(passage.text, first=False) for passage in shown)
    tokens = sum(map(len, ids)) / max(1, len(shown))
    encoded = min(limits.passages * (limits.samples + limits.held_out), len(passages))
    # Each passage is encoded twice: with and without the sink.
    needed = min(limits.store_bytes, int(2 * encoded * tokens * model.bytes_per_token))
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            f"Found {free / 1e9:.1f} GB free in {os.fspath(folder.parent)}, expected "
            f"{needed / 1e9:.1f} GB for keys and values of {encoded} passages; free some space, or "
            "choose another folder (--output)"
        )
