"""GGUF files: conversion, cache, and files that are refused."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.files import state_folder
from blockattn_rag.model import gguf as ours
from blockattn_rag.model.loading import load_config, load_model, load_tokenizer, resolve_name

HIDDEN, WIDE, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An 8-bit Llama with a byte-level tokenizer and a chat template, as written by llama.cpp."""
    path = tmp_path / "tiny.gguf"
    write(path)
    return path


def write(path: Path, seed: int = 0, architecture: str = "llama") -> None:
    tokens = [*sorted(ByteLevel.alphabet()), "th", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(seed)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        shapes |= {
            **{f"{name}.{part}_norm": (HIDDEN,) for part in ("attn", "ffn")},
            **{f"{name}.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "output")},
            **{f"{name}.attn_{part}": (HIDDEN * KV_HEADS // HEADS, HIDDEN) for part in "kv"},
            **{f"{name}.ffn_{part}": (WIDE, HIDDEN) for part in ("gate", "up")},
            f"{name}.ffn_down": (HIDDEN, WIDE),
        }
    for name, shape in shapes.items():
        data = draw.normal(scale=0.3, size=shape).astype(np.float32)
        if data.ndim == 1:
            writer.add_tensor(f"{name}.weight", data + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(data, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_gives_the_same_model_as_in_transformers(file: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    found = load_model(file)
    assert found.dtype == torch.float32
    assert not hasattr(found.config, "quantization_config")
    weights = found.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=0, atol=0)
    assert load_config(file).max_position_embeddings == 512
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("the <|im_end|>").input_ids[0] == 256
    assert tokenizer.eos_token_id == 258


def test_weights_are_converted_in_parts(
    file: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_model(file).state_dict()
    shutil.rmtree(home)
    monkeypatch.setattr(ours, "_SHARD_BYTES", 50_000)
    parts = load_model(file).state_dict()
    assert len([*Path(resolve_name(file)).glob("model-*.safetensors")]) > 3
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_a_file_may_be_quantized_at_load(file: Path) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    engine = BlockAttentionEngine.from_pretrained(file, dtype="int8", device="cpu", recipe="none")
    plain = BlockAttentionEngine.from_pretrained(file, device="cpu", recipe="none")
    prompt = ["the first passage", "the second", "the question"]
    answers = [engine.generate(prompt, max_new_tokens=4) for _ in range(2)]
    assert (answers[0].stats.misses, answers[1].stats.hits) == (2, 2)
    assert engine.model.fingerprint != plain.model.fingerprint
    assert engine.model.profile.token_outline[0][2] == torch.bfloat16


def test_files_are_detected_by_their_suffix_in_any_case(file: Path, tmp_path: Path) -> None:
    assert resolve_name(shutil.copy(file, tmp_path / "BIG.GGUF")) == resolve_name(file)
    folder = tmp_path / "model.gguf"
    shutil.copytree(resolve_name(file), folder)
    assert resolve_name(folder) == str(folder)


def test_passages_of_gguf_models_are_reused(file: Path) -> None:
    engine = BlockAttentionEngine.from_pretrained(file)
    prompt = ["the first passage", "the second", "the question"]
    first, second = (engine.generate(prompt, max_new_tokens=4) for _ in range(2))
    assert (first.stats.misses, second.stats.hits) == (2, 2)
    assert first.token_ids == second.token_ids
    assert engine.model.name == str(file)


def test_a_file_is_converted_once_and_identified_by_its_content(
    file: Path,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "blockattn_rag"):
        folder = resolve_name(file)
    message = f"Dequantizing tiny.gguf into {folder}. Later runs skip this step."
    assert [one.getMessage() for one in caplog.records] == [message]
    assert Path(folder).is_relative_to(home)
    moved = shutil.copy(file, tmp_path / "elsewhere.gguf")
    other = tmp_path / "other.gguf"
    write(other, seed=1)
    assert resolve_name(other) != folder
    monkeypatch.setattr(ours, "_dequantize", None)
    assert resolve_name(moved) == resolve_name(file) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_name("~/elsewhere.gguf") == folder


def test_a_file_is_hashed_once_per_change(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Mock(wraps=hashlib.file_digest)
    monkeypatch.setattr(hashlib, "file_digest", compute)
    first = resolve_name(file)
    assert resolve_name(file) == first
    assert [call.args[0].name for call in compute.call_args_list] == [str(file)]
    write(file, seed=1)
    assert resolve_name(file) != first
    assert compute.call_count == 2


def test_unreadable_files_are_reported_and_leave_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such GGUF file: .*lost\.gguf"):
        resolve_name(tmp_path / "lost.gguf")
    text, strange = tmp_path / "text.gguf", tmp_path / "strange.gguf"
    cut = tmp_path / "cut.gguf"
    text.write_text("no model at all")
    write(strange, architecture="never-heard-of")
    write(cut)
    cut.write_bytes(cut.read_bytes()[:1000])
    for path in (text, strange, cut):
        with pytest.raises(ValueError, match=f"Transformers cannot read .*{path.name}: .+"):
            load_model(path)
    assert not list((state_folder() / "gguf").iterdir())


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_names_missing_package(file: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(ImportError, match=rf"{package}, which is not installed; .*\[gguf\]"):
        resolve_name(file)


def test_smollm2_is_loaded_from_its_gguf_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_SMOLLM2_PACKAGE", "no_such_package_here")
    assert resolve_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    package = tmp_path / "packages" / "a_package_of_one_file"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs what is not here')")
    shutil.copy(file, package)
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    monkeypatch.setattr(ours, "_SMOLLM2_PACKAGE", package.name)
    assert resolve_name("smollm2") == resolve_name(file)


def test_concurrent_loads_share_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = ours._write_model

    def with_another(path: Path, folder: Path) -> None:
        if not made:  # simulates a faster process
            made.append(path)
            made.append(resolve_name(path))
        make(path, folder)

    monkeypatch.setattr(ours, "_write_model", with_another)
    assert resolve_name(file) == made[1]
    assert os.listdir(Path(made[1]).parent) == [Path(made[1]).name]
    load_model(file)
