"""``blockattn-rag fingerprint``: what a server must know of a model, for its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.app.cli.files import writable
from blockattn_rag.app.cli.output import JsonOption, ModelArgument, emit, note, waiting, working
from blockattn_rag.app.rag.model_names import existing_model, loading


def _no_correction(name: str) -> str:
    if name != "none":
        raise typer.BadParameter(
            f"found {name!r}, expected none: a profile holds no correction, because servers do not "
            "apply them. Leave it out, or answer with a local model"
        )
    return name


def fingerprint(
    model: Annotated[str, typer.Argument(help=ModelArgument, callback=existing_model)],
    sink: Annotated[
        str | None,
        typer.Option(
            help="What passages are encoded after: none, bos, or head:N such as head:4. Default: "
            "what the model was fine-tuned with, or none."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the profile to this file.", callback=writable)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16: the one that the server runs.")
    ] = "auto",
    correction: Annotated[  # noqa: ARG001 - refused by its callback
        str, typer.Option(hidden=True, callback=_no_correction)
    ] = "none",
    as_json: JsonOption = False,
) -> None:
    """Measure a model for a server: print its fingerprint, or with --json its whole profile.

    A server is given the profile as a file (--output), and serves the model in this dtype alone.
    """
    with working(as_json):
        from blockattn_rag.model import BlockModel
        from blockattn_rag.server.measured_profile import profile_of

        with waiting(f"loading {model}"), loading(model):
            loaded = BlockModel.from_pretrained(
                model, device=device, dtype=dtype, pack_weights=False
            )
        profile = profile_of(loaded, sink)
        if output is not None:
            profile.write(output)
            note(
                f"{output} is the profile of {model} in {profile.dtype}, for sink={profile.sink!r}"
            )
    emit(as_json, profile.to_dict(), profile.fingerprint)
