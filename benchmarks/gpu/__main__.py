"""Run steps of the GPU campaign. ``campaign.sh`` selects the interpreter and the folders."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))
from harness import COMMANDS, STEPS, Campaign
from report import write_report


def main(
    names: Annotated[list[str], typer.Argument(help="Commands and steps to run, or report.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    resume: Annotated[Path | None, typer.Option(help="Folder with earlier results.")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes after which no case starts.")] = 5.0,
    dry: Annotated[bool, typer.Option(help="Test with tiny shapes on the CPU.")] = False,
) -> None:
    """Run steps of the campaign, and write the report of all finished steps."""
    # The warning about missing block fine-tuning is irrelevant for random weights.
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    chosen = [step for name in names for step in COMMANDS.get(name, (name,)) if step != "report"]
    if unknown := set(chosen) - set(STEPS):
        expected = ", ".join((*COMMANDS, *STEPS, "report"))
        raise typer.BadParameter(f"Unknown step {unknown.pop()!r}: expected one of {expected}.")
    campaign = Campaign(out, resume, dry)
    steps = {step: partial(import_module(step).cases, campaign) for step in chosen}
    status = campaign.run_all(steps, minutes)
    write_report(out, resume)
    raise typer.Exit(status)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    typer.run(main)
