"""An int8 checkpoint, which transformers cannot run without further packages, can be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockattn_rag.prompts.blocks import IN_MEMORY
from blockattn_rag.server.config import ServingConfig
from tests_vllm.engines import Engine, running
from tests_vllm.reference import MODEL, TOKENS, Reference

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with int8 weights in the format of llm-compressor."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("int8") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(reference: Reference, quantized: Path) -> Iterator[Engine]:
    options = reference.options(store=str(quantized.parent / "kv"))
    with running(options, model=str(quantized)) as engine:
        yield engine


def test_blocks_that_the_server_encoded_are_loaded(reference: Reference, engine: Engine) -> None:
    case = reference.telling(0)
    engine.encode(case.blocks, IN_MEMORY)
    answer = engine.block(case, IN_MEMORY)
    assert len(answer.tokens) == TOKENS
    assert answer.tokens != engine.full(case).tokens
    assert answer.blocks["loaded_tokens"] == sum(case.lengths)


def test_a_single_block_gives_the_answer_of_full_mode(reference: Reference, engine: Engine) -> None:
    """With one block, block mode equals full mode."""
    case = reference.telling(1)
    first, question = case.blocks[0], case.ids[sum(case.lengths) :]
    case = case._replace(ids=[*first, *question], lengths=(len(first),))
    engine.encode([first], IN_MEMORY)
    answer = engine.block(case, IN_MEMORY)
    assert answer.tokens == engine.full(case).tokens
    assert answer.blocks["loaded_tokens"] == len(first)


def test_the_fingerprint_differs_from_that_of_the_original(
    reference: Reference, quantized: Path
) -> None:
    config = ServingConfig.parse(reference.options())
    profile, _ = config.profile_of(str(quantized), torch.float32)
    assert profile.fingerprint != reference.profile.fingerprint
    assert replace(profile, fingerprint="", name="") == replace(
        reference.profile, fingerprint="", name=""
    )
