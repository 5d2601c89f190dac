"""LoRA adapters in PEFT's files: both ways, whole or not at all, and plain LoRA alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockattn_rag.model import lora_config, lora_files
from blockattn_rag.model.lora_files import CONFIG, SIDECAR, WEIGHTS
from blockattn_rag.model.reader import Reader
from tests.models import shared_tiny_llama, tiny_model

METADATA = {"fingerprint": "f" * 64}

SOME_LAYERS = {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}


def a_reader(seed: int = 0, **options: Any) -> Reader:
    reader = Reader.new(shared_tiny_llama(), rank=3, alpha=5, seed=seed, **options)
    for index, matrix in enumerate(reader.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        matrix.requires_grad_(False).copy_(torch.randn(matrix.shape, generator=generator))
    return reader


def load(folder: Path, **options: Any) -> Reader:
    return Reader.load(folder, shared_tiny_llama(), **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A reader of q_proj and o_proj."""
    folder = tmp_path / "reader"
    a_reader(targets=["q_proj", "o_proj"]).save(folder, METADATA)
    return folder


def by_peft(folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    config = LoraConfig(
        **{"r": 3, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    )
    made: Any = get_peft_model(tiny_model("llama"), config)
    made.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# -- both ways -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "lora_alpha": 7},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 1.5}},
        {"use_rslora": True, "rank_pattern": {r".*\.2\..*": 5}},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.3, "task_type": "CAUSAL_LM"},
    ],
    ids=str,
)
def test_an_adapter_of_peft_is_the_same_after_loading_and_saving(
    options: Any, tmp_path: Path
) -> None:
    first = load(by_peft(tmp_path / "theirs", **options))
    assert not first.metadata
    first.save(tmp_path / "ours", METADATA)
    second = load(tmp_path / "ours")
    assert second.digest == first.digest
    assert [lora.scaling for lora in second.layers.values()] == [
        lora.scaling for lora in first.layers.values()
    ]


def test_a_reader_comes_back_as_it_was_saved(saved: Path) -> None:
    found, expected = load(saved), a_reader(targets=["q_proj", "o_proj"])
    assert found.digest == expected.digest
    assert found.metadata["fingerprint"] == METADATA["fingerprint"]
    assert not any(matrix.requires_grad for matrix in found.parameters())
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_16_bit_adapter_is_kept_in_float32(tmp_path: Path) -> None:
    by_peft(tmp_path)
    exact = load(tmp_path)
    change_tensors(tmp_path, lambda found: found.update({k: v.half() for k, v in found.items()}))
    for rounded, matrix in zip(load(tmp_path).parameters(), exact.parameters(), strict=True):
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, matrix.half().float())


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias = True"),
        ({"bias": "all"}, "bias='none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "without embeddings"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [(0, 2), (1, 3)]}, "layer_replication"),
        ({"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_more_than_plain_lora_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    by_peft(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LOHA"}, "train it as LORA"),
        ({"of_the_future": {"yes": 1}}, "of_the_future = {'yes': 1}"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": "3"}, "r = '3'"),
        ({"r": 4}, "matrices of .* expected .*4, 32"),
        ({"lora_alpha": 0}, "lora_alpha = 0"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf.* finite numbers above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan.* finite numbers above 0"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000.* finite numbers above 0"),
        ({"r": 0}, "r = 0.* finite numbers above 0"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "alpha_pattern .* finite numbers above 0"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern .* finite numbers above 0"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "many"}}, "alpha_pattern"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "("}, "a regular expression"),
        ({"target_modules": "(?:" * 5000 + ")" * 5000}, "a regular expression"),
        ({"exclude_modules": "("}, "a regular expression"),
        ({**SOME_LAYERS, "layers_pattern": "("}, "name no layers"),
        ({"target_modules": ["q_proj", "k_proj", "o_proj"]}, "lacks model.layers.0.self_attn.k"),
        ({"target_modules": ["q_proj"]}, "has model.layers.0.self_attn.o_proj.lora_A.weight and 5"),
        ({"target_modules": ["of_another_model"]}, "another model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_does_not_fit_is_refused(values: Any, message: str, saved: Path) -> None:
    change_json(saved / CONFIG, **values)
    with pytest.raises(ValueError, match=message):
        load(saved)


SLOW = r"(?:(.)|(.)(.)?\1?)+[!?]"
"""Takes a time that grows exponentially with the length of a layer's path."""


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": SLOW},
        {"exclude_modules": SLOW},
        {**SOME_LAYERS, "layers_pattern": SLOW},
        {"rank_pattern": {SLOW: 2}},
        {"alpha_pattern": {SLOW: 2}},
    ],
    ids=lambda values: [*values][-1],
)
@pytest.mark.timeout(60)
def test_a_pattern_that_takes_too_long_is_refused(
    values: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_config, "_MATCHING_S", 0.2, raising=False)
    change_json(saved / CONFIG, **values)
    with pytest.raises(ValueError, match="take too long to match, list the names of the layers"):
        load(saved)


def test_a_config_that_is_nested_too_deeply_is_refused(saved: Path) -> None:
    (saved / CONFIG).write_text('{"r": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match="is damaged"):
        load(saved)


def _renamed(tensors: dict[str, Tensor]) -> None:
    key = next(iter(tensors))
    tensors[key.replace(".0.", ".7.")] = tensors.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.popitem(), "lacks"),
        (_renamed, "no linear layer of the model takes"),
        (lambda found: found.clear(), "lacks .* and 11 more"),
        (lambda found: next(iter(found.values())).fill_(float("nan")), "not finite"),
        (lambda found: next(iter(found.values())).mul_(2), "not those that reader.json tells of"),
    ],
    ids=["one lacks", "another name", "none", "nan", "other numbers"],
)
def test_matrices_that_do_not_fit_are_refused(change: Any, message: str, saved: Path) -> None:
    change_tensors(saved, change)
    with pytest.raises(ValueError, match=message):
        load(saved)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, SIDECAR])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_files_are_refused(name: str, damage: str, saved: Path) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: len(data) // 2] if damage == "cut" else b"[1, 2]")
    with pytest.raises(ValueError, match=name):
        load(saved)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_folder_without_an_adapter_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    (saved / name).unlink()
    for folder in (saved, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="holds no adapter_"):
            load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 2}, "version 2; expected 'blockattn_rag.reader', version 1"),
        ({"format": "other"}, "has format 'other'"),
        ({"fingerprint": None}, "has None for 'fingerprint'"),
        ({"digest": 3}, "has 3 for 'digest'"),
    ],
)
def test_a_sidecar_that_is_not_ours_is_refused(values: Any, message: str, saved: Path) -> None:
    change_json(saved / SIDECAR, **values)
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_a_reader_of_another_base_is_refused(saved: Path) -> None:
    assert load(saved, fingerprint="f" * 64).layers
    with pytest.raises(ValueError, match=r"made for a model of fingerprint ffff.*, found 0000"):
        load(saved, fingerprint="0" * 64)


# -- writing ---------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    reader, folder = a_reader(), tmp_path / "reader"
    with pytest.raises(ValueError, match="'fingerprint' of the model"):
        reader.save(folder, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        reader.save(folder, {**METADATA, "when": object()})
    next(reader.parameters())[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        reader.save(folder, METADATA)
    assert not [*tmp_path.iterdir()]


def test_only_an_earlier_reader_or_an_empty_folder_is_replaced(saved: Path, tmp_path: Path) -> None:
    a_reader(1).save(saved, METADATA)
    assert load(saved).digest == a_reader(1).digest
    (tmp_path / "empty").mkdir()
    a_reader().save(tmp_path / "empty", METADATA)
    theirs = by_peft(tmp_path / "theirs")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(saved)
    for taken in (theirs, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(FileExistsError, match="is not replaced"):
            a_reader().save(taken, METADATA)
    assert load(saved).digest == a_reader(1).digest
    assert {path.name for path in tmp_path.iterdir()} == {
        "reader",
        "empty",
        "theirs",
        "file",
        "link",
    }


STEPS = ["matrices", "their name", "config", "sidecar", "old one's name", "own name", "clearing"]


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
def test_a_process_killed_while_it_saves_leaves_the_old_reader_or_the_new_one(
    step: int, saved: Path
) -> None:
    old, new = load(saved).digest, a_reader(1)
    writer = os.fork()
    if writer == 0:
        _save_until_killed(new, saved, step)
    _, status = os.waitpid(writer, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    if STEPS[step] == "own name":  # the two names change hands: both are whole, and beside
        left = {load(path).digest for path in saved.parent.iterdir()}
        assert left == {old, new.digest}
    else:
        assert load(saved).digest == (new.digest if STEPS[step] == "clearing" else old)
    a_reader(2).save(saved, METADATA)
    assert load(saved).digest == a_reader(2).digest


def _save_until_killed(reader: Reader, folder: Path, step: int) -> NoReturn:
    """Killed before one of the steps that change the disk."""
    try:
        steps = iter(range(step))

        def killing(function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if next(steps, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return run

        of_module: Any = lora_files
        of_module.save = killing(of_module.save)
        os.replace = killing(os.replace)
        os.rename = killing(os.rename)
        shutil.rmtree = killing(shutil.rmtree)
        reader.save(folder, METADATA)
    finally:
        os._exit(1)  # an error here must not run the parent's code
