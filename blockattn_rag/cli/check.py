"""``blockattn-rag check``: can this model be used in blocks without changing its answers?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from blockattn_rag.cli.output import JsonOption, ModelArgument, emit, table, working
from blockattn_rag.rag.model_names import existing_model, loading


def check(
    model: Annotated[str, typer.Argument(help=ModelArgument, callback=existing_model)],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure whether a model gives the same answers in blocks; exit status 0 if so, else 1."""
    with working(as_json):
        from blockattn_rag.check.checks import check_model
        from blockattn_rag.model import BlockModel

        with loading(model):
            loaded = BlockModel.from_pretrained(model, device=device, dtype=dtype)
        report = check_model(loaded)
    rows = [asdict(row) for row in report.rows]
    data = {
        "model": model,
        "passed": report.passed,
        "block_tuned": loaded.is_block_tuned,
        "fingerprint": loaded.fingerprint,
        "rows": rows,
    }
    verdict = "usable in block mode" if report.passed else "NOT usable in block mode"
    if not loaded.is_block_tuned:
        verdict += "; not known to be block-fine-tuned, so its answers will be less accurate there"
    shown = [
        (
            row["name"],
            "yes" if row["passed"] else "NO",
            f"{row['value']:.1e}",
            "-" if row["budget"] is None else f"{row['budget']:.1e}",
            row["detail"],
        )
        for row in rows
    ]
    columns = ("check", "passed", "found", "allowed", "detail")
    emit(as_json, data, table(model, columns, shown, left=(0, 4)), verdict)
    if not report.passed:
        raise typer.Exit(1)
