"""The bundled model and the fictional encyclopedia that it knows how to read."""

from __future__ import annotations

from pathlib import Path


def bundled_model_path() -> Path:
    """The folder of the model that comes with the package."""
    return Path(__file__).parent / "model"
