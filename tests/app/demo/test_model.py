"""The files of the bundled model in the package."""

from __future__ import annotations

from pathlib import Path

from blockattn_rag.model.loading import load_config, resolve_name


def test_the_bundled_model_fits_the_package() -> None:
    files = [path for path in Path(resolve_name("bundled")).rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 12 * 2**20


def test_the_bundled_model_is_next_to_the_code_that_loads_it() -> None:
    import blockattn_rag.model

    folder = Path(blockattn_rag.model.__file__).parent / "bundled"
    assert Path(resolve_name("bundled")).samefile(folder)
    assert load_config("bundled").num_hidden_layers == 4
