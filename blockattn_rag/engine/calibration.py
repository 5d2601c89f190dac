"""A calibration: settings of block mode that suit a model and a collection, and what is left.

It is made by ``blockattn-rag calibrate`` and lies in the folder of the database, because it is of
one collection, in one file with those of other models and of other tenants::

    {"version": 1, "calibrations": {KEY: {"model": ..., "settings": {...}, ...}}}

``KEY`` is the model's fingerprint, with the tenant's namespace and a colon before it if he has one.
Such a file in the folder of a store is found by every engine over that store.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import load_merge
from blockattn_rag.engine.option_files import merge_digest
from blockattn_rag.engine.options import (
    NO_CORRECTION,
    NO_MERGE,
    NO_READER,
    BlockOptions,
    GenerateOptions,
)
from blockattn_rag.engine.results import Certificate
from blockattn_rag.errors import StoreError
from blockattn_rag.files.atomic import write_json
from blockattn_rag.kv.quantization import KVDtype, check_kv_dtype
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.promotion import NO_PROMOTION
from blockattn_rag.prompts.sinks import NO_SINK
from blockattn_rag.store import DirectoryStore, KVStore
from blockattn_rag.store.directory import CALIBRATION_FILE
from blockattn_rag.store.namespaces import check_namespace

VERSION = 1

PLAIN_SETTINGS: Mapping[str, str] = {
    "sink": NO_SINK,
    "correction": NO_CORRECTION,
    "merge": NO_MERGE,
    "promote": NO_PROMOTION,
    "reader": NO_READER,
}
"""Block mode as published. These are the options that a calibration chooses."""

_HARMLESS = ("on_miss", "assembly", "retry")
"""Options that leave block mode's predictions as they are."""

logger = logging.getLogger("blockattn_rag")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was chosen for one model, and what was then measured on other questions.

    Args:
        fingerprint: of the model, without adapters of the reader.
        model, dtype: for people.
        settings: the options of ``PLAIN_SETTINGS``.
        digests: of the contents of the files that settings name; see :func:`settings_digests`.
        prompt_digest: of the prompts' common parts; see :func:`prompt_digest`.
        chosen_on: questions that the settings were chosen on; none of them was certified on.
        compared: settings that were compared.
        stability: share of bootstrap resamples of these questions in which the same settings win.
        certificates: what was measured, by number of passages, ascending; at least one.
        targets: lower bounds of ``agreement`` and, where asked for, ``recovery``, which every
            certificate had to reach.
        seed: of all that was random.
        date: ISO 8601, UTC.
        package_version: of this package.
        namespace: of the passages that were measured: other tenants have other passages.
        kv_dtype: what the engine kept blocks in that was measured. What was measured with blocks
            in int8 counts for others too, which only lack its rounding; not the other way round.
    """

    fingerprint: str
    model: str
    dtype: str
    settings: Mapping[str, str]
    digests: Mapping[str, str]
    prompt_digest: str
    chosen_on: int
    compared: int
    stability: float
    certificates: tuple[Certificate, ...]
    targets: Mapping[str, float]
    seed: int
    date: str
    package_version: str
    namespace: str = ""
    kv_dtype: KVDtype = "model"

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Calibration:
        """The calibration whose ``to_dict`` this is.

        Raises:
            TypeError, ValueError: fields are missing or wrong, or there are others.
        """
        derived = ("qualified", "reason")
        given = {name: value for name, value in found.items() if name not in derived}
        certificates = tuple(map(_certificate, given.pop("certificates")))
        made = cls(**given, certificates=certificates)
        texts = *made.settings.values(), *made.digests.values()
        check_kv_dtype(made.kv_dtype)
        check_namespace(made.namespace)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("found settings or digests that are no texts")
        if made.settings.keys() != PLAIN_SETTINGS.keys() or not made.certificates:
            raise ValueError(f"found settings {sorted(made.settings)} and certificates "
                             f"{len(made.certificates)}, expected {sorted(PLAIN_SETTINGS)} and "
                             "at least one")  # fmt: skip
        return made

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {**asdict(self), "qualified": self.qualified, "reason": self.reason}

    @property
    def key(self) -> str:
        """What tells it from the others of a file."""
        return _key(self.fingerprint, self.namespace)

    @property
    def qualified(self) -> bool:
        """Whether every certificate reached the targets, on questions that are new to the
        settings."""
        return all(one.qualified for one in self.certificates)

    @property
    def reason(self) -> str:
        """Why it is not qualified, and what to do where that is clear; empty if it is."""
        if self.qualified:
            return ""
        most = max(self.certificates, key=lambda one: one.seen)
        if most.seen:
            # Half of all questions certify.
            return (
                f"{most.seen} of the {most.questions} questions it was certified on are among "
                "those that its reader, correction or merge was made with, which flatters it; "
                f"give `blockattn-rag calibrate` {2 * most.seen} more that are not (--questions)"
            )
        targets = " and ".join(f"{k} {100 * v:.1f} %" for k, v in self.targets.items())
        return f"it did not reach the targets ({targets}, lower bounds)"

    def options_beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings where an engine was given none, with those given.

        A correction belongs to its sink: with another sink given, it is left out.
        """
        settings = dict(self.settings)
        if given.get("sink", settings["sink"]) != settings["sink"]:
            del settings["correction"]
        return {**settings, **given}

    def certificate(
        self, options: GenerateOptions, prompt: BlockPrompt, *, reads_int8: bool = False
    ) -> Certificate | None:
        """What was measured for an answer's options and prompts like its own; None if nothing.

        ``reads_int8``: some of its blocks are quantised.

        Of prompts with fewer passages than were measured, the next larger number tells, because the
        loss grows with the number of passages.
        """
        if reads_int8 and self.kv_dtype != "int8":
            return None
        passages = sum(block.is_passage for block in prompt.context)
        fitting = (one for one in self.certificates if one.passages >= passages)
        found = next(fitting, None) if passages else None
        return found if found and not self._mismatch(options, prompt) else None

    def doubt(
        self, options: GenerateOptions, prompt: BlockPrompt, kv_dtype: KVDtype = "model"
    ) -> str:
        """Why the certificate does not vouch for an answer; empty if it does, or need not.

        ``kv_dtype``: what the engine keeps blocks in.
        """
        if not any(block.is_passage for block in prompt.context):
            return ""
        if mismatch := self._mismatch(options, prompt):
            return f"Its calibration does not count here: {mismatch}."
        if kv_dtype == "int8" and self.kv_dtype != "int8":
            return "Its calibration measured blocks that are not rounded to int8, as they are here."
        found = self.certificate(options, prompt)
        if found is None:
            most = self.certificates[-1].passages
            return f"Its calibration measured prompts of at most {most} passages, not more."
        if not found.qualified:
            return f"Its calibration does not qualify: {self.reason} (found: {found})."
        return ""

    def measured_together(self, options: GenerateOptions) -> bool:
        """Whether what these options repair block mode with was measured together."""
        names = ("sink", "correction", "merge", "reader")
        return all(self.settings[name] == getattr(options, name) for name in names)

    def _mismatch(self, options: GenerateOptions, prompt: BlockPrompt) -> str:
        # Not parsed, which looks for the files: an answer that needs none may come without.
        plain = GenerateOptions()
        names = (name for name in BlockOptions.__annotations__ if name not in _HARMLESS)
        measured = {name: self.settings.get(name, getattr(plain, name)) for name in names}
        others = [name for name, value in measured.items() if getattr(options, name) != value]
        if others:
            return f"other {', '.join(others)} was asked for"
        if prompt_digest(prompt) != self.prompt_digest:
            return "the prompt has another head or block template than the prompts measured"
        return ""

    def __str__(self) -> str:
        chosen = [
            f"{name}={value}"
            for name, value in self.settings.items()
            if value != PLAIN_SETTINGS[name]
        ]
        kept = "" if self.kv_dtype == "model" else f", blocks in {self.kv_dtype}"
        settings = f"{' '.join(chosen) or 'plain block mode'}{kept}"
        return "; ".join([settings, *map(str, self.certificates)])


def _key(fingerprint: str, namespace: str) -> str:
    return f"{namespace}:{fingerprint}" if namespace else fingerprint


def _certificate(found: Mapping[str, Any]) -> Certificate:
    made = Certificate(**found)
    values = asdict(made)
    if values["recovery"] is None:  # there was nothing to take away
        values = {name: v for name, v in values.items() if not name.startswith("recovery")}
    if wrong := [name for name, value in values.items() if not isinstance(value, (int, float))]:
        raise ValueError(f"found no number for {', '.join(wrong)}")
    return made


def prompt_digest(prompt: BlockPrompt) -> str:
    """sha256 of what the prompts of one pipeline have in common before the question: the text of
    the blocks that are no passages, and the templates of those that are."""
    head = [block.text for block in prompt.context if not block.is_passage]
    passages = [block.template for block in prompt.context if block.is_passage]
    templates = sorted({(template.before, template.after) for template in passages})
    return hashlib.sha256(json.dumps([head, templates]).encode()).hexdigest()


def calibration_path(store: KVStore) -> Path | None:
    """Where the calibrations of a store are, or would be; None for stores without a folder."""
    return store.path / CALIBRATION_FILE if isinstance(store, DirectoryStore) else None


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """The calibrations in a file by their keys; none if there is no such file.

    Raises:
        StoreError: the file is damaged, of another version, or cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
        if (version := found.get("version")) != VERSION:
            raise StoreError(
                f"{path} is of version {version!r}, expected {VERSION}; calibrate anew after "
                "deleting it"
            )
        known = map(Calibration.from_dict, found["calibrations"].values())
        return {calibration.key: calibration for calibration in known}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} is damaged ({error!r}); delete it and run `blockattn-rag calibrate` again"
        ) from error


def find_calibration(
    store: KVStore, model: BlockModel, namespace: str = "", given: str | Path | None = None
) -> tuple[Calibration | None, str]:
    """The calibration of a model and a namespace, if it can be used; else why there is none, where
    there is something to tell. A file that cannot be used is warned of.

    Args:
        given: a file to look in first; then the store's folder is.

    Raises:
        ValueError: there is no file ``given``; or there are calibrations, and the model's
            fingerprint cannot be taken.
    """
    own = None if given is None else _existing(given)
    places = [path for path in (own, calibration_path(store)) if path is not None]
    why_none = ""
    try:
        for path in places:
            known = read_calibrations(path)
            if known and (found := known.get(_key(model.fingerprint, namespace))):
                _check_usable(found, model)
                return found, ""
            if not why_none and (known or path == own):
                others = "of another model, another dtype or another namespace"
                why_none = f"The calibration in {path} is {others if known else 'empty'}."
    except StoreError as error:
        logger.warning("going on without a calibration: %s", error)
        return None, "Its calibration cannot be used."
    return None, why_none


def _existing(given: str | Path) -> Path:
    """The path of a file that was given. Raises ``ValueError`` unless there is one."""
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(
            f"found no file of calibrations at {path}; `blockattn-rag calibrate --db DB` writes "
            f"{CALIBRATION_FILE} into DB"
        )
    return path


def load_calibration(path: str | Path, model: BlockModel, namespace: str = "") -> Calibration:
    """The calibration of a model in a file: the namespace's own, or the only one.

    Raises:
        ValueError: there is no such file, or it does not hold one of this model.
        StoreError: the file is damaged, or what its settings name is not what was measured.
    """
    known = read_calibrations(_existing(path)).values()
    alike = [one for one in known if one.fingerprint == model.fingerprint]
    found = [one for one in alike if one.namespace == namespace] or alike
    if len(found) > 1:
        raise ValueError(
            f"{path} holds calibrations of {model.name} of the namespaces "
            f"{', '.join(sorted(repr(one.namespace) for one in found))}, expected one; take an "
            "engine with one of these, or write one alone with `calibrate --output FILE`"
        )
    if not found:
        held = ", ".join(f"{one.model} in {one.dtype} (key {one.key})" for one in known)
        raise ValueError(
            f"{path} holds calibrations of {held or 'no model'}, expected one of {model.name} as "
            f"it is loaded (key {_key(model.fingerprint, namespace)}): load it in the same dtype, "
            "or calibrate it with `blockattn-rag calibrate`"
        )
    _check_usable(found[0], model)
    return found[0]


def _check_usable(calibration: Calibration, model: BlockModel) -> None:
    """Raises ``StoreError`` unless the settings can be used as they were measured."""
    try:
        options = GenerateOptions.parse(calibration.settings, GenerateOptions())
        digests = settings_digests(model, options)
    except (OSError, ValueError) as error:
        raise StoreError(f"its settings cannot be used ({error}); calibrate anew") from error
    if changed := [k for k, v in digests.items() if v != calibration.digests.get(k)]:
        named = ", ".join(f"the {name} in {getattr(options, name)}" for name in changed)
        raise StoreError(f"{named} has changed since; calibrate anew")


def settings_digests(model: BlockModel, options: GenerateOptions) -> dict[str, str]:
    """sha256 of the contents of the reader, the correction and the learned merge that options
    name.

    Raises:
        OSError, ValueError: one is not there, or is for another model or sink.
    """
    found = {}
    if options.reader != NO_READER:
        found["reader"] = model.load_reader(options.reader).digest
    if options.correction != NO_CORRECTION:
        found["correction"] = model.load_correction(options.correction, options.sink).digest
    if isinstance(merge := load_merge(options.merge), LearnedMerge):
        merge.ready_for(lambda: model.fingerprint, merge.bias.device)  # which refuses another's
        found["merge"] = merge_digest(options.merge) or ""
    return found


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration into the file, in place of an earlier one of the same model and
    namespace.

    Raises as ``read_calibrations``: the other calibrations are kept.
    """
    kept = {**read_calibrations(path), calibration.key: calibration}
    entries = {key: one.to_dict() for key, one in sorted(kept.items())}
    write_json(path, {"version": VERSION, "calibrations": entries})
