"""Run one step of the GPU campaign; ``campaign.sh`` runs all of them."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

sys.path.append(str(Path(__file__).parents[1]))
from harness import DONE, STEPS, Campaign
from report import write_report

Step = Literal["correctness", "first_token", "shared_prompt", "transfer", "profiling", "report"]


def main(
    step: Annotated[Step, typer.Argument(help="The step to run.")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    resume: Annotated[Path | None, typer.Option(help="Folder of earlier results.")] = None,
    minutes: Annotated[float, typer.Option(help="Start no case after this many minutes.")] = 9.0,
    dry: Annotated[bool, typer.Option(help="Use tiny shapes on the CPU, as a test.")] = False,
) -> None:
    """Measure one step of the campaign, or write the report of all finished steps."""
    # The warning about missing block fine-tuning does not matter for random weights.
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    status = DONE
    if step in STEPS:
        campaign = Campaign(out, resume, dry, minutes)
        status = campaign.run(step, import_module(step).cases(campaign))
    write_report(out, resume)
    raise typer.Exit(status)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    typer.run(main)
