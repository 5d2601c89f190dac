"""``blockattn-rag train``: block fine-tuning of any supported model.

The options are made from the fields of ``FinetuneConfig``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

import typer

from blockattn_rag.app.cli.figures import count, duration
from blockattn_rag.app.cli.output import JsonOption, ModelArgument, emit, note, working
from blockattn_rag.app.rag.model_names import existing_model, loading
from blockattn_rag.lab.training.config import FinetuneConfig, OnError

if TYPE_CHECKING:
    from blockattn_rag.lab.training.report import FinetuneReport

# Type and default of each option that the command line spells in another way than its setting.
_SPELT: dict[str, tuple[Any, Any]] = {
    "output": (Path, Parameter.empty),
    "train_data": (list[Path], Parameter.empty),
    "eval_data": (list[Path] | None, None),
    "modes": (str, "block,full"),
    "on_error": (OnError, "raise"),
}


def train(**options: Any) -> None:
    """Fine-tune a model so that it answers in block mode as well as in full mode.

    Data: JSON lines with "messages"; with "prompt", "blocks", "response"; or with "question",
    "passages", "answer". The defaults are the papers'. For several GPUs: `accelerate launch -m
    blockattn_rag train ...`.
    """
    as_json = options.pop("as_json")
    with working(as_json):
        from blockattn_rag.lab.training.finetune import finetune

        config = _config(options)
        with loading(config.model):
            report = finetune(config)
    _show(report, as_json, config)


def _options() -> Iterator[Parameter]:
    """The options of ``train``, named as the settings are."""
    model = typer.Option(help=ModelArgument, callback=existing_model)
    yield Parameter("model", Parameter.KEYWORD_ONLY, annotation=Annotated[str, model])
    # The type of ``positions`` would load torch. Here it is text, as every other Literal.
    types = get_type_hints(FinetuneConfig, localns={"Positions": str})
    for setting in fields(FinetuneConfig):
        if setting.metadata:
            yield _option(setting, types[setting.name])
    yield Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)


def _option(setting: Field[Any], kind: Any) -> Parameter:
    """The option of a setting."""
    written = str if get_origin(kind) is Literal else kind
    kind, default = _SPELT.get(setting.name, (written, setting.default))
    flag = "data" if setting.name == "train_data" else setting.name.replace("_", "-")
    option = typer.Option(
        f"--{flag}/--no-{flag}" if default is True else f"--{flag}",
        help=setting.metadata["help"],
        rich_help_panel=setting.metadata.get("panel"),
        min=setting.metadata.get("least"),
    )
    kind = Annotated[kind, option]
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


# typer reads the options from the signature.
train.__signature__ = Signature([*_options()])  # type: ignore[attr-defined]


def _config(options: dict[str, Any]) -> FinetuneConfig:
    """The settings that the options stand for."""
    spelt = {
        "eval_data": options["eval_data"] or (),
        "modes": tuple(mode.strip() for mode in options["modes"].split(",")),
    }
    return FinetuneConfig(**{**options, **spelt})


def _show(report: FinetuneReport, as_json: bool, config: FinetuneConfig) -> None:
    skipped = [*report.train.skipped, *report.evaluation.skipped]
    for reason in skipped:
        note(f"left out: {reason}")
    losses = report.eval_losses.items()
    data = {
        "output": report.output,
        "steps": report.steps,
        "seconds": report.seconds,
        "loss": report.loss,
        "eval_losses": {mode: {"before": first, "after": last} for mode, (first, last) in losses},
        "skipped": skipped,
        "history": report.history,
    }
    what = "adapter" if config.lora else "model"
    emit(
        as_json,
        data,
        f"The {what} is in {report.output}. Measure it: blockattn-rag eval --model {report.output} "
        "--data FILE",
        f"{count(report.steps, 'step')} in {duration(report.seconds)}; training loss over the last "
        f"logged steps: {report.loss:.4f}.",
        _evaluation(report),
    )


def _evaluation(report: FinetuneReport) -> str:
    if not report.eval_losses:
        return "No evaluation data were given (--eval-data), so the losses by mode are not known."
    losses = (
        f"{mode} mode {before:.4f} before, {after:.4f} after"
        for mode, (before, after) in report.eval_losses.items()
    )
    return f"Loss on the answers of the evaluation data: {'; '.join(losses)}."
