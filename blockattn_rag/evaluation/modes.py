"""Modes of the evaluation: what their names say of how the engine is called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from blockattn_rag.engine.calibration import (
    PLAIN_SETTINGS,
    Calibration,
    load_calibration,
    prompt_digest,
)
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.option_files import file_digests
from blockattn_rag.engine.options import BlockOptions, GenerateOptions
from blockattn_rag.errors import DataError
from blockattn_rag.kv.quantization import KVDtype, check_kv_dtype
from blockattn_rag.prompts.blocks import BlockPrompt

# With nothing of what the engine may have been told to repair block mode with.
MODES: Mapping[str, Mapping[str, Any]] = {
    "full": {"mode": "full"},
    "block": {"mode": "block", "positions": "reordered", **PLAIN_SETTINGS},
    "block-composite": {"mode": "block", "positions": "composite", **PLAIN_SETTINGS},
    "closed-book": {"mode": "full"},
}
"""How the engine is called in each mode. Closed-book prompts hold no passage.

Block mode with other options is a mode too, such as ``sink=head:4+promote=1``; see
``engine.options.BlockOptions``. So is ``calibrated=FILE``, with the settings that the file holds
for the model, and ``kv_dtype=int8``, in which an engine of its own keeps blocks in memory.
"""

_CALIBRATED = "calibrated"
_KV_DTYPE = "kv_dtype"
_PART = re.compile(r"\+(?=[a-z_]+=)")

# By engine, those over its model that keep blocks in another type.
_ENGINES: WeakKeyDictionary[BlockAttentionEngine, dict[KVDtype, BlockAttentionEngine]] = (
    WeakKeyDictionary()
)


def mode_options(mode: str, engine: BlockAttentionEngine | None = None) -> dict[str, Any]:
    """How the engine is called in a mode.

    ``engine``: the one that answers, which calibrations are looked up for; None allows none.

    Raises:
        ValueError: there is no such mode, or no such calibration.
        StoreError: a calibration cannot be used; see ``engine.calibration.load_calibration``.
    """
    if mode in MODES:
        return dict(MODES[mode])
    found = _parts(mode)
    if (kind := found.pop(_KV_DTYPE, None)) is not None:
        check_kv_dtype(kind)
    found.pop(_CALIBRATED, None)
    if calibration := _calibration_of(mode, engine):
        found = calibration.options_beside(found)
    how = {**MODES["block"], **found}
    GenerateOptions.parse(how, GenerateOptions())  # refuses values that are none
    return how


def _parts(mode: str) -> dict[str, str]:
    """The options that a mode's name consists of."""
    found: dict[str, str] = {}
    for part in _PART.split(mode):
        name, equals, value = part.partition("=")
        is_known = name in BlockOptions.__annotations__ or name in (_KV_DTYPE, _CALIBRATED)
        if not equals or name in found or not is_known:
            raise ValueError(
                f"modes are {', '.join(MODES)}, calibrated=FILE, and options of block mode such as "
                f"sink=head:4 or sink=bos+promote=1, and kv_dtype=int8; found {mode!r}"
            )
        found[name] = value
    return found


def _calibration_of(mode: str, engine: BlockAttentionEngine | None) -> Calibration | None:
    """The calibration that a mode names; None if it names none."""
    path = None if mode in MODES else _parts(mode).get(_CALIBRATED)
    if path is None:
        return None
    if engine is None:
        raise ValueError(f"the mode {mode!r} goes by the model, and here is none; name its options")
    return load_calibration(path, engine.model, engine.access.namespace)


def check_prompt(mode: str, engine: BlockAttentionEngine, prompt: BlockPrompt) -> None:
    """Refuse a mode that names a calibration which measured other prompts.

    Raises:
        ValueError: it did.
    """
    calibration = _calibration_of(mode, engine)
    if calibration and calibration.prompt_digest != prompt_digest(prompt):
        chosen = calibration.settings.items()
        named = "+".join(f"{name}={one}" for name, one in chosen if one != PLAIN_SETTINGS[name])
        raise ValueError(
            f"the mode {mode!r} names a calibration of prompts with another head or block template "
            f"than this one, which begins {prompt.context[0].text[:60]!r}; choose the prompt "
            "format that was calibrated (`calibrate` and `ask` use chat), or compare its settings "
            f"as the mode {named or 'block'}"
        )


def noted_of(engine: BlockAttentionEngine) -> dict[str, Any]:
    """What records depend on beside the model: nothing with blocks as the model computes them."""
    return {} if engine.kv_dtype == "model" else {_KV_DTYPE: engine.kv_dtype}


def engine_for(engine: BlockAttentionEngine, mode: str) -> BlockAttentionEngine:
    """The engine that answers in a mode: another one where its blocks are kept in another type,
    because a store would hand out what is there."""
    named = None if mode in MODES else _parts(mode).get(_KV_DTYPE)
    kind = engine.kv_dtype if named is None else check_kv_dtype(named)
    if kind == engine.kv_dtype:
        return engine
    others = _ENGINES.setdefault(engine, {})
    if kind not in others:
        others[kind] = BlockAttentionEngine(engine.model, kv_dtype=kind, resident_bytes=0)
    return others[kind]


def files_of_modes(
    modes: Sequence[str], engine: BlockAttentionEngine | None = None
) -> dict[str, str]:
    """By mode, a digest of what the files say that it names; empty if it names none. Of a
    calibration, the settings count.

    Raises:
        ValueError, StoreError: as ``mode_options``; or there is no such file.
    """
    found = {}
    for mode in modes:
        how = mode_options(mode, engine)
        digests = file_digests({name: how.get(name) for name in ("correction", "merge", "reader")})
        told = sorted(digest for digest in digests.values() if digest)
        if mode not in MODES and _CALIBRATED in _parts(mode):
            told.append(json.dumps(how, sort_keys=True))
        found[mode] = hashlib.sha256("".join(told).encode()).hexdigest()[:16] if told else ""
    return found


def check_unchanged(files: Mapping[str, str], engine: BlockAttentionEngine) -> None:
    """Refuse a run in which files that modes name were replaced, because they are read for each
    sample.

    Args:
        files: of ``files_of_modes``, before the run.

    Raises:
        DataError: some were.
    """
    now = files_of_modes(list(files), engine)
    if changed := [mode for mode, digest in files.items() if now[mode] != digest]:
        raise DataError(
            f"the files that the mode {changed[0]!r} names were replaced while it was measured, "
            "and some samples have the new ones; measure it anew, without the records of this run"
        )
