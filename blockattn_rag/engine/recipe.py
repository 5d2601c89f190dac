"""Recipes: how a model runs in block mode.

Models that are not block-fine-tuned give worse answers in block mode. A recipe improves them,
mainly by changing how passages are encoded, which costs nothing per answer. ``blockattn-rag
repair`` makes a recipe and saves it as a folder::

    recipe.json           the fields of ``Recipe``, its digest, and the sha256 of the adapter's file
    adapter.safetensors   the adapter, if there is one
    report.json           measurements of ``repair``
    report.png            plot of the report, if there is one
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.files import sync, temporary_name, write_json
from blockattn_rag.kv.context import Positions
from blockattn_rag.model.correction import Correction, read_correction, save_correction
from blockattn_rag.prompts.sinks import NO_SINK, check_sink

VERSION = 1
RECIPE_FILE = "recipe.json"
_ADAPTER_FILE, _REPORT_FILE, _PLOT_FILE = "adapter.safetensors", "report.json", "report.png"
_MADE_BY = "`blockattn-rag repair`"


@dataclass(frozen=True)  # no slots: cached_property needs a __dict__
class Recipe:
    """How a model runs in block mode. Equal recipes give equal answers.

    Args:
        sink: Prefix tokens that passages are encoded with: ``"none"``, ``"bos"`` or ``"head:N"``;
            see ``prompts.sinks``.
        adapter: Correction of passages' keys and values after encoding, fitted to ``sink``.
        promote: Number of passages at the end of a prompt to compute with the question. They
            attend to everything before them, as in full attention.
        recompute: Share of the other passages' tokens to compute again for each question, with full
            attention: those that the question attends to most (``model.recompute``).
        positions: ``"reordered"`` re-encodes keys for their place in the prompt; ``"composite"``
            does not (the papers' ablation).
        fingerprints: Fingerprints of the models that the recipe belongs to. Empty: any model.
            Required with an adapter.
        model: Name of the model, for messages.
        prompt_format: Prompt format that the adapter was fitted with.
        report: Measurements of ``repair``, as plain JSON.
        source: Origin of the recipe, for messages.

    Raises:
        ValueError, TypeError: a field has a wrong value.
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
                f"Invalid recompute {share!r} with positions={self.positions!r}: recomputed tokens "
                "need positions='reordered'."
            )
        object.__setattr__(self, "recompute", float(self.recompute))  # equal shares, equal digests
        given: object = self.fingerprints
        if isinstance(given, str):
            raise TypeError("Invalid fingerprints: found a string, expected a tuple of strings.")
        object.__setattr__(self, "fingerprints", tuple(self.fingerprints))
        for name in ("model", "prompt_format"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"Invalid {name} {getattr(self, name)!r}: expected a string.")
        if not all(isinstance(one, str) for one in self.fingerprints):
            raise TypeError(f"Invalid fingerprints {self.fingerprints!r}: expected strings.")
        if self.adapter is None:
            return
        if not isinstance(self.adapter, Correction):
            raise TypeError(
                f"Invalid adapter: found {type(self.adapter).__name__}, expected a Correction."
            )
        if not self.fingerprints:
            raise ValueError(
                "A recipe with an adapter needs the fingerprints of its models, found none."
            )
        if self.adapter.sink != self.sink:
            raise ValueError(
                f"The adapter was fitted to sink={self.adapter.sink!r}, found sink={self.sink!r}: "
                "use the adapter's sink, or fit another adapter."
            )

    @cached_property
    def digest(self) -> str:
        """sha256 of all fields except report and source: 64 hex digits."""
        return hashlib.sha256(json.dumps(self._fields(), sort_keys=True).encode()).hexdigest()

    @property
    def outline(self) -> RecipeOutline:
        """The recipe without the weights of its adapter."""
        adapter = self.adapter.digest if self.adapter else ""
        return RecipeOutline(self.sink, adapter, self.promote, self.recompute, self.positions)

    @property
    def encoding(self) -> tuple[str, str]:
        """See ``RecipeOutline.encoding``."""
        return self.outline.encoding

    def __str__(self) -> str:
        return str(self.outline)

    def _fields(self) -> dict[str, Any]:
        # Written only if set, so that older recipes keep their digests.
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
        """Save the recipe to a folder, completely or not at all. Replaces an existing recipe.

        Args:
            folder: Folder to write.
            plot: PNG image of the report.

        Raises:
            ValueError: the report is not plain JSON, or ``folder`` has other files.
            OSError: the folder cannot be written.
        """
        folder = Path(folder).expanduser().resolve()  # replace the target of a link, not the link
        is_foreign = folder.is_dir() and any(folder.iterdir()) and not _holds_recipe(folder)
        if is_foreign or folder.is_file():
            raise ValueError(
                f"{folder} is not a recipe: it has no {RECIPE_FILE}. Choose a new or empty folder."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = temporary_name(folder)
        staging.mkdir()
        try:
            self._write(staging, plot)
            if folder.exists():
                old = temporary_name(folder)
                folder.rename(old)
                staging.rename(folder)
                shutil.rmtree(old)
            else:
                staging.rename(folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync(folder.parent)

    def _write(self, folder: Path, plot: bytes | None) -> None:
        saved = {
            "version": VERSION,
            "digest": self.digest,
            **self._fields(),
            "adapter_sha256": None,
        }
        if self.adapter:
            save_correction(self.adapter, folder / _ADAPTER_FILE)
            saved["adapter_sha256"] = _sha256(folder / _ADAPTER_FILE)
        report = dict(self.report)
        json.dumps(report, allow_nan=False)  # raises before anything is written
        write_json(folder / _REPORT_FILE, report)
        if plot is not None:
            (folder / _PLOT_FILE).write_bytes(plot)
        write_json(folder / RECIPE_FILE, saved)

    @classmethod
    def load(cls, folder: str | Path) -> Recipe:
        """Read a recipe's folder and check all of its files.

        Raises:
            ValueError: the folder has no recipe, or the recipe is damaged.
        """
        folder = Path(folder).expanduser()
        saved = read_fields(folder)
        path = folder / _ADAPTER_FILE
        adapter = None
        if saved["adapter"] is not None:
            _require(path)
            if (found := _sha256(path)) != saved["adapter_sha256"]:
                raise _damaged(path, f"found sha256 {found}, expected {saved['adapter_sha256']}")
            adapter = read_correction(path)
        names = ("sink", "promote", "positions", "model", "prompt_format")
        try:
            recipe = cls(
                **{name: saved[name] for name in names},
                recompute=saved.get("recompute", 0.0),
                adapter=adapter,
                fingerprints=tuple(saved["fingerprints"]),
                report=_read_json(folder / _REPORT_FILE),
                source=str(folder),
            )
        except (TypeError, ValueError) as error:
            raise _damaged(folder / RECIPE_FILE, str(error)) from error
        if recipe.digest != saved["digest"]:
            raise _damaged(
                folder / RECIPE_FILE, f"found digest {recipe.digest}, expected {saved['digest']}"
            )
        return recipe

    def with_positions(self, positions: Positions | None) -> Recipe:
        """The recipe with other positions. None leaves it unchanged."""
        return self if positions in (None, self.positions) else replace(self, positions=positions)


def read_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of a recipe's ``recipe.json``, and check their names and version.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = folder / RECIPE_FILE
    if not _holds_recipe(folder):
        raise ValueError(
            f"Found no recipe at {folder}: expected a folder with {RECIPE_FILE}, which {_MADE_BY} "
            "or `Recipe.save` writes, or one of 'auto', 'none', 'bos' and 'head:N'."
        )
    saved = _read_json(path)
    if (version := saved.get("version")) != VERSION:
        raise ValueError(
            f"{path} has version {version!r}, expected {VERSION}: make the recipe again with "
            f"{_MADE_BY}, or update blockattn_rag."
        )
    expected = {"version", "digest", "adapter_sha256", *Recipe()._fields()}
    if saved.keys() - {"recompute"} != expected:
        others = ", ".join(sorted(saved.keys() ^ expected))
        raise _damaged(path, f"missing or unknown fields: {others}")
    if not isinstance(saved["fingerprints"], list):
        raise _damaged(path, f"found fingerprints {saved['fingerprints']!r}, expected a list")
    return saved


def _holds_recipe(folder: Path) -> bool:
    with suppress(OSError, ValueError):  # an invalid file name
        return (folder / RECIPE_FILE).is_file()
    return False


def _read_json(path: Path) -> dict[str, Any]:
    _require(path)
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"found no valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise _damaged(path, f"found {type(found).__name__}, expected a JSON object")
    return found


def _require(path: Path) -> None:
    if not path.is_file():
        raise _damaged(path, "the file is missing")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {why.removesuffix('.')}. Restore the recipe's folder from a copy, or "
        f"make it again with {_MADE_BY}. (To change a field, use dataclasses.replace and "
        "Recipe.save.)"
    )
