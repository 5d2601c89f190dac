"""``blockattn-rag train``: block fine-tuning of any supported model.

The options are made from the fields of ``FinetuneConfig`` and ``LoraConfig``.
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
from blockattn_rag.lab.training.config import FinetuneConfig, LoraConfig, OnError, Range

if TYPE_CHECKING:
    from blockattn_rag.lab.training.report import FinetuneReport

# Type and default of each option that the command line spells in another way than its setting.
_SPELT: dict[str, tuple[Any, Any]] = {
    "output": (Path, Parameter.empty),
    "train_data": (list[Path], Parameter.empty),
    "eval_data": (list[Path] | None, None),
    "modes": (str, "block,full"),
    "on_error": (OnError, "raise"),
    "lora": (bool, False),
    "lora_target_modules": (list[str] | None, None),
}
_SHORTER = {"train_data": "data", "lora_target_modules": "lora_target"}


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
    """The options of ``train``, named as the settings are; those of adapters after ``lora_``."""
    model = typer.Option(help=ModelArgument, callback=existing_model)
    yield Parameter("model", Parameter.KEYWORD_ONLY, annotation=Annotated[str, model])
    # The type of ``positions`` would load torch. Here it is text, as every other Literal.
    types = get_type_hints(FinetuneConfig, localns={"Positions": str})
    for setting in fields(FinetuneConfig):
        if setting.metadata:
            range_ = setting.metadata.get("range")
            yield _option(setting, setting.name, types[setting.name], setting.default, range_)
    types = get_type_hints(LoraConfig)
    for setting in fields(LoraConfig):  # no default: options that were not given are not passed on
        yield _option(setting, f"lora_{setting.name}", types[setting.name] | None, None)
    yield Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)


def _option(
    setting: Field[Any], name: str, kind: Any, default: Any, range_: Range | None = None
) -> Parameter:
    """The option of a setting; ``range_``: of the numbers that the command line itself accepts."""
    kind, default = _SPELT.get(name, (str if get_origin(kind) is Literal else kind, default))
    flag = _SHORTER.get(name, name).replace("_", "-")
    bounds = range_.bounds if range_ else {}
    option = typer.Option(
        f"--{flag}/--no-{flag}" if default is True else f"--{flag}",
        help=setting.metadata["help"] or None,
        rich_help_panel=setting.metadata.get("panel"),
        min=bounds.get("min"),
        max=bounds.get("max"),
    )
    kind = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


# typer reads the options from the signature.
train.__signature__ = Signature([*_options()])  # type: ignore[attr-defined]


def _config(options: dict[str, Any]) -> FinetuneConfig:
    """The settings that the options stand for."""
    spelt = {
        "eval_data": options["eval_data"] or (),
        "modes": tuple(mode.strip() for mode in options["modes"].split(",")),
        "lora": _adapters(options),
    }
    return FinetuneConfig(**{**options, **spelt})


def _adapters(options: dict[str, Any]) -> LoraConfig | None:
    """Take the options of adapters out of ``options``; None where no adapters are wanted."""
    found = {setting.name: options.pop(f"lora_{setting.name}") for setting in fields(LoraConfig)}
    given = {name: value for name, value in found.items() if value is not None}
    if given and not options["lora"]:
        raise ValueError("the adapters' options need --lora: without it, all weights are trained")
    if not options["lora"]:
        return None
    targets = given.pop("target_modules", ["all-linear"])
    if targets != ["all-linear"]:
        given["target_modules"] = tuple(targets)
    return LoraConfig(**{"alpha": 2 * given.get("rank", LoraConfig().rank), **given})


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
