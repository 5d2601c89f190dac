"""Quantized weights: tiny checkpoints of each scheme, quantization at load, and refused schemes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from blockattn_rag.check.model import check_model
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.loading import load_model
from blockattn_rag.model.quantized import check_quantization, loading_arguments, quantization_of
from tests.models import save_model, tiny_model

BLOCK = 16
_WIDE = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_model(tiny_model("llama", **_WIDE), tmp_path / "plain")


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")


def rewrite(folder: Path, settings: dict[str, Any], change: Callable[[str, Tensor], Any]) -> None:
    """Replace the weights of the decoder's linear layers, and add the quantization settings."""
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        is_linear = name.endswith("_proj.weight")
        tensors |= change(name, tensor) if is_linear else {name: tensor}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def fp8(folder: Path) -> dict[str, Tensor]:
    """Quantize to 8-bit floats with one scale per square block, as in DeepSeek and Qwen."""
    expected = {}

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.view(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        expected[name] = (small.float() * scale[:, None, :, None]).view_as(weight)
        return {name: small.view_as(weight), f"{name}_scale_inv": scale}

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    rewrite(folder, {**settings, "weight_block_size": [BLOCK, BLOCK]}, change)
    return expected


def compressed_tensors(folder: Path) -> dict[str, Tensor]:
    """Quantize to 8-bit integers with one scale per row."""
    expected = {}

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        small = (weight / scale).round().to(torch.int8)
        expected[name] = small.float() * scale
        return {name: small, f"{name}_scale": scale}

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    rewrite(folder, settings, change)
    return expected


@pytest.mark.parametrize(
    ("quantize", "packages"),
    [(fp8, ["accelerate"]), (compressed_tensors, ["accelerate", "compressed_tensors"])],
)
def test_a_quantized_checkpoint_is_exact(
    plain: Path, quantize: Callable[[Path], dict[str, Tensor]], packages: list[str]
) -> None:
    need(*packages)
    original: Any = AutoModelForCausalLM.from_pretrained(plain)
    original.load_state_dict(quantize(plain), strict=False)
    model = BlockModel.from_pretrained(plain, device="cpu", dtype="float32")
    ids = torch.arange(5, 40)[None]
    with torch.inference_mode():
        expected = original.eval()(input_ids=ids).logits[0, -1]
    torch.testing.assert_close(model.next_logits(ids), expected, rtol=1e-4, atol=1e-4)
    assert_exact(model, torch.float32)
    # Servers use other kernels for these weights, which give different keys and values.
    assert model.fingerprint != CheckpointModel(plain, torch.float32).fingerprint


def assert_exact(model: BlockModel, dtype: torch.dtype) -> None:
    """Check that block mode equals the oracle on the loaded model, and the dtype of its blocks."""
    assert {outline[2] for outline in model.profile.token_outline} == {dtype}
    report = check_model(model)
    assert report.passed, report
    model.check_unchanged()


def test_mxfp4_experts_are_exact(tmp_path: Path) -> None:
    need("accelerate")
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model: Any = tiny_model("gpt_oss", **_WIDE, **experts, layer_types=None)
    folder = save_model(model, tmp_path)
    file = folder / "model.safetensors"
    tensors, expected = {}, {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    for name, tensor in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        count, columns, rows = tensor.shape  # stored transposed, in groups of 32 inputs
        blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
        exact = pairs.flatten(-2) * 2.0 ** (scales[..., None].float() - 127)
        expected[name] = exact.flatten(-2).transpose(1, 2)
    assert expected
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": mxfp4}))
    loaded = BlockModel.from_pretrained(folder, device="cpu")
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded.hf_model.state_dict()[name], tensor, rtol=0, atol=0)
    assert_exact(loaded, torch.float32)


@pytest.mark.parametrize(("dtype", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_weights_are_quantized_at_load(plain: Path, dtype: str, package: str) -> None:
    need("accelerate", package)
    model = BlockModel.from_pretrained(plain, device="cpu", dtype=dtype)
    assert_exact(model, torch.bfloat16)
    exact: Any = load_model(plain, device="cpu")
    quantized: Any = model.hf_model
    weight = quantized.model.layers[0].self_attn.q_proj.weight
    original = exact.model.layers[0].self_attn.q_proj.weight
    parts = [weight] if dtype == "nf4" else [weight.qdata, weight.scale]
    size = sum(part.nbytes for part in parts)
    assert size < original.nbytes / (3 if dtype == "int8" else 6)

    fingerprints = {
        BlockModel.from_pretrained(plain, device="cpu", dtype=other).fingerprint
        for other in ("auto", "bfloat16", dtype, dtype)
    }
    assert len(fingerprints) == 3
    assert model.fingerprint in fingerprints
    # A saved and loaded checkpoint has the same weights.
    folder = save_model(quantized, plain.parent / "quantized")
    again = BlockModel.from_pretrained(folder, device="cpu")
    assert_exact(again, torch.bfloat16)
    assert again.fingerprint != CheckpointModel(folder, torch.bfloat16).fingerprint
    ids = torch.arange(5, 40)[None]
    torch.testing.assert_close(again.next_logits(ids), model.next_logits(ids))


@pytest.mark.parametrize(("dtype", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_passages_of_quantized_models_are_reused(plain: Path, dtype: str, package: str) -> None:
    need("accelerate", package)
    prompt = ["the first passage", "the second", "the question"]
    answers = []
    for _ in range(2):
        engine = BlockAttentionEngine.from_pretrained(
            plain, device="cpu", dtype=dtype, store=plain.parent / "kv", recipe="none"
        )
        answers.append(engine.generate(prompt, max_new_tokens=4))
    assert (answers[0].stats.misses, answers[1].stats.hits) == (2, 2)
    assert answers[0].token_ids == answers[1].token_ids


def test_unsupported_shapes_use_the_general_kernel(tmp_path: Path) -> None:
    need("accelerate", "bitsandbytes")
    model = tiny_model("llama")  # key projections have 16 rows and 32 columns
    folder = save_model(model, tmp_path)
    assert_exact(BlockModel.from_pretrained(folder, device="cpu", dtype="nf4"), torch.bfloat16)


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("awq", "gptqmodel"),
        ("gptq", "gptqmodel optimum"),
        ("compressed-tensors", "compressed-tensors"),
        ("bitsandbytes", "bitsandbytes"),
        ("torchao", "torchao"),
        ("hqq", "hqq"),
        ("auto-round", "auto-round"),
        ("quark", "amd-quark"),
        ("fp8", ""),
        ("mxfp4", ""),
    ],
)
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, method: str, packages: str
) -> None:
    find = Mock(return_value=None)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    commands = f"pip install accelerate {packages}".strip()
    message = f"^org/model is quantized with {method}. Loading it needs .*`{commands}`$"
    with pytest.raises(ImportError, match=message):
        check_quantization("org/model", {"quant_method": method})
    assert find.call_count == 1 + len(packages.split())


def test_a_scheme_that_cannot_be_exact_or_is_unknown_is_refused() -> None:
    named = {"quant_method": "bitsandbytes_8bit"}
    for eight in (named, {"quant_method": "bitsandbytes", "load_in_8bit": True}):
        with pytest.raises(UnsupportedModelError, match=r"other blocks\. Use .*dtype='int8'"):
            check_quantization("org/model", eight)
    with pytest.raises(UnsupportedModelError, match="quantized with 'new', which this version"):
        check_quantization("org/model", {"quant_method": "new"})
    check_quantization("org/model", {})


def test_a_quantized_checkpoint_is_not_quantized_again(plain: Path) -> None:
    need("accelerate")
    fp8(plain)
    with pytest.raises(ValueError, match=r"is already quantized with fp8: omit dtype"):
        load_model(plain, device="cpu", dtype="int8")


def test_fp8_weights_are_dequantized_on_the_cpu_even_with_a_gpu(plain: Path) -> None:
    need("accelerate")
    fp8(plain)
    config = AutoConfig.from_pretrained(plain)
    on_cpu = loading_arguments("org/model", config, "auto", "cpu")
    assert quantization_of(on_cpu["config"])["dequantize"]
    assert "config" not in loading_arguments("org/model", config, "auto", "cuda")
    assert "dequantize" not in quantization_of(config)


@pytest.mark.parametrize(("dtype", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_quantizing_without_its_extra_names_it(
    monkeypatch: pytest.MonkeyPatch, dtype: str, package: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find("json")
    )
    with pytest.raises(ImportError, match=rf"dtype='{dtype}' needs {package}, .*\[quantized\]"):
        loading_arguments("org/model", tiny_model("llama").config, dtype, "cpu")
