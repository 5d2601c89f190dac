"""Recipes: settings for running a model in block mode.

Models that are not block-fine-tuned answer less accurately in block mode than in full mode. A
recipe reduces this loss. Its sink and adapter change how passages are encoded, at no cost per
answer. ``blockattn-rag repair`` creates a recipe and saves it as a folder::

    recipe.json             the recipe's fields and digest, and the names of the other files
    adapter-*.safetensors   the adapter, if there is one
    report-*.png            plot of the measurements, if there is one
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.recipe_files import (
    ADAPTER,
    MOST_JSON_BYTES,
    PLOT,
    RECIPE_FILE,
    RecipeFields,
    damaged,
    part,
    read_consistently,
    write_recipe,
)
from blockattn_rag.kv.context import Positions
from blockattn_rag.model.correction import Correction, correction_bytes, read_correction
from blockattn_rag.prompts.sinks import NO_SINK, check_sink


@dataclass(frozen=True)  # Without slots: cached_property needs a __dict__.
class Recipe:
    """Settings for running a model in block mode. With equal recipes, a model gives equal answers.

    Args:
        sink: Prefix tokens that passages are encoded with, such as ``"head:4"``; see
            ``prompts.sinks``.
        adapter: Correction for passages' keys and values after encoding, fitted with ``sink``.
        promote: Number of passages at the end of a prompt to compute together with the question.
            They attend to everything before them, as in full attention.
        recompute: Share (0 to 1) of the other passages' tokens to recompute with full attention for
            each question: the tokens that it attends to most (``model.recompute``).
        positions: ``"reordered"`` moves keys to their positions in the prompt. ``"composite"`` does
            not, as in the ablation studies of the Block-Attention and TurboRAG papers.
        fingerprints: Fingerprints of the models that the recipe belongs to. Empty: any model.
            Required with an adapter.
        model: Name of the model, for messages.
        prompt_format: Name of the prompt format that the adapter was fitted with.
        report: Measurements of ``repair``. Must be serializable as JSON.
        source: Origin of the recipe, for messages.

    Raises:
        ValueError, TypeError: A field is invalid.
    """

    sink: str = NO_SINK
    adapter: Correction | None = None
    promote: int = 0
    recompute: float = 0.0
    positions: Positions = "reordered"
    fingerprints: tuple[str, ...] = ()
    model: str = ""
    prompt_format: str = ""
    report: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_sink(self.sink)
        if not isinstance(self.promote, int) or isinstance(self.promote, bool) or self.promote < 0:
            raise ValueError(
                f"Invalid promote {self.promote!r}: expected a number of passages, 0 or more."
            )
        share: object = self.recompute
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(
                f"Invalid recompute {share!r}: expected a share of the tokens, from 0 to 1."
            )
        if self.positions not in get_args(Positions):
            known = " or ".join(map(repr, get_args(Positions)))
            raise ValueError(f"Invalid positions {self.positions!r}: expected {known}.")
        if share and self.positions != "reordered":
            raise ValueError(
                f"Invalid recompute {share!r} with positions={self.positions!r}: recomputing "
                "tokens requires positions='reordered'."
            )
        # Equal shares must have equal digests: 1 and 1.0, -0.0 and 0.0.
        object.__setattr__(self, "recompute", float(self.recompute) + 0.0)
        given: object = self.fingerprints
        if isinstance(given, str):
            raise TypeError("Invalid fingerprints: found a string, expected a tuple of strings.")
        object.__setattr__(self, "fingerprints", tuple(self.fingerprints))
        for name in ("model", "prompt_format"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"Invalid {name} {getattr(self, name)!r}: expected a string.")
        if not all(isinstance(fingerprint, str) for fingerprint in self.fingerprints):
            raise TypeError(f"Invalid fingerprints {self.fingerprints!r}: expected strings.")
        if self.adapter is None:
            return
        if not isinstance(self.adapter, Correction):
            raise TypeError(
                f"Invalid adapter: found {type(self.adapter).__name__}, expected a Correction."
            )
        if not self.fingerprints:
            raise ValueError(
                "A recipe with an adapter requires the fingerprints of its models, found none: "
                "pass fingerprints=(model.fingerprint,)."
            )
        if self.adapter.sink != self.sink:
            raise ValueError(
                f"The adapter was fitted with sink={self.adapter.sink!r}, found sink={self.sink!r}"
                ": use the adapter's sink, or fit a new adapter."
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields except report and source, 64 hex digits."""
        return hashlib.sha256(json.dumps(self._fields(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def of_text(cls, text: str) -> Recipe | None:
        """Parse a text form, such as ``"head+recompute:0.1"``; see ``engine.outline``. Returns None
        for any other text, such as a folder's path.

        Raises:
            ValueError: A value is out of range.
        """
        if (found := RecipeOutline.parsed(text)) is None:
            return None
        return cls(
            found.sink, promote=found.promote, recompute=found.recompute, source=f"settings {text}"
        )

    @property
    def outline(self) -> RecipeOutline:
        adapter = self.adapter.digest if self.adapter else ""
        return RecipeOutline(self.sink, adapter, self.promote, self.recompute, self.positions)

    @property
    def encoding(self) -> tuple[str, str]:
        return self.outline.encoding

    def __str__(self) -> str:
        return str(self.outline)

    def _fields(self) -> dict[str, Any]:
        # `recompute` is only written if set, so that older recipes keep their digests.
        return ({"recompute": self.recompute} if self.recompute else {}) | {
            "sink": self.sink,
            "adapter": self.adapter.digest if self.adapter else None,
            "promote": self.promote,
            "positions": self.positions,
            "fingerprints": list(self.fingerprints),
            "model": self.model,
            "prompt_format": self.prompt_format,
        }

    # -- files -------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, plot: bytes | None = None) -> None:
        """Save the recipe to a folder atomically. Replaces an existing recipe.

        Args:
            folder: Folder that does not exist, is empty, or only contains a recipe, which may be
                damaged.
            plot: PNG image of the report.

        Raises:
            ValueError, TypeError: The report is invalid, or ``folder`` contains other files.
            OSError: The folder is not writable, or is locked by another process for over a minute.
        """
        fields = {"digest": self.digest, **self._fields(), "report": dict(self.report)}
        if (nbytes := len(json.dumps(fields, indent=2, allow_nan=False)) + 200) > MOST_JSON_BYTES:
            raise ValueError(
                f"The recipe has {nbytes:,} bytes as JSON, expected at most {MOST_JSON_BYTES:,}: "
                "shorten the report."
            )
        parts = {ADAPTER: correction_bytes(self.adapter)} if self.adapter else {}
        if plot is not None:
            parts[PLOT] = plot
        # Replace the target of a link, not the link itself.
        place = Path(folder).expanduser().resolve()
        write_recipe(place, fields, parts)

    @classmethod
    def load(cls, folder: str | Path) -> Recipe:
        """Read a recipe from its folder, and verify it and its adapter.

        Raises:
            ValueError: The folder contains no recipe, or the recipe is damaged or unsupported.
            OSError: The recipe cannot be read.
        """
        folder = Path(folder).expanduser()
        return read_consistently(folder, lambda saved: cls._read(folder, saved))

    @classmethod
    def _read(cls, folder: Path, saved: RecipeFields) -> Recipe:
        known = {name: value for name, value in vars(saved).items() if name in _SAVED}
        if saved.adapter is not None:
            known["adapter"] = read_correction(part(folder, ADAPTER, saved))
        try:
            recipe = cls(**known, source=str(folder))
        except (TypeError, ValueError) as error:
            raise damaged(folder / RECIPE_FILE, str(error)) from error
        if recipe.digest != saved.digest:
            raise damaged(
                folder / RECIPE_FILE, f"found digest {recipe.digest}, expected {saved.digest}"
            )
        return recipe


_SAVED = {field.name for field in fields(Recipe)} - {"source"}
