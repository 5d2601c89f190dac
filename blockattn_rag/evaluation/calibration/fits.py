"""Files of repairs that a calibration is given: what they are, and what each was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from blockattn_rag.engine.calibration import PLAIN_SETTINGS, settings_digests
from blockattn_rag.engine.made_with import foreign, is_digest, noted_with, warn_of_foreign
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.evaluation.calibration.settings import Setting, usable_sinks
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction_file import load_correction
from blockattn_rag.prompts.sinks import FIRST_BLOCK, NO_SINK


@dataclass(frozen=True, slots=True)
class Fits:
    """Repairs that were fitted, each as a setting with the sink and the repairs it was made with,
    as far as these are known and at hand; None where none was given.

    Args:
        corrected, merged, read: with the correction, the learned merge and the reader.
        digests: of their contents.
    """

    corrected: Setting | None
    merged: Setting | None
    read: Setting | None
    digests: Mapping[str, str]

    @property
    def paths(self) -> list[str]:
        """The files and the folder, as settings name them."""
        pairs = (self.corrected, "correction"), (self.merged, "merge"), (self.read, "reader")
        return [one.options[name] for one, name in pairs if one is not None]


def fits_of(
    model: BlockModel, correction: Path | None, merge: Path | None, reader: Path | None
) -> Fits:
    """The fits in files and a folder. Warns of one that was made with another that is not given.

    Raises:
        OSError, ValueError: one is not there, is no such file, or is for another model.
        UnsupportedModelError: the model cannot use merges.
    """
    files = {"correction": correction, "merge": merge, "reader": reader}
    paths = {name: str(path.expanduser().resolve()) for name, path in files.items() if path}
    if merge and not model.supports_relay:
        raise UnsupportedModelError(
            f"{model.name} refuses merges, because its attention cannot be replaced; leave out "
            f"{merge}"
        )
    corrected = None
    if correction is not None:
        corrected = Setting(load_correction(paths["correction"]).sink, paths["correction"])
    given = {"sink": corrected.sink if corrected else NO_SINK, **paths}
    options = GenerateOptions.parse(given, GenerateOptions())
    digests = settings_digests(model, options)
    by_digest = {digest: paths[name] for name, digest in digests.items()}
    own = {
        name: _own(model, name, paths[name], noted, by_digest)
        for name, noted in noted_with(model, options).items()
    }
    return Fits(corrected, own.get("merge"), own.get("reader"), digests)


def _own(
    model: BlockModel, name: str, path: str, noted: Mapping[str, str], by_digest: Mapping[str, str]
) -> Setting:
    """A fit with what it was made with, as far as that is known and given."""
    sink = noted.get("sink", NO_SINK)
    if sink == FIRST_BLOCK or not usable_sinks(model.tokenizer, [sink]):
        sink = NO_SINK  # passages are ingested alone

    def at_hand(one: str) -> str:
        told = noted.get(one, PLAIN_SETTINGS[one])
        return by_digest.get(told, PLAIN_SETTINGS[one] if is_digest(told) else told)

    made = Setting(sink, at_hand("correction"), at_hand("merge"))
    made = replace(made, **{name: path})
    warn_of_foreign(foreign(model, GenerateOptions.parse(made.options, GenerateOptions())))
    return made
