"""Loading from paths, model objects and adapters; device and dtype."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig

from blockattn_rag.model import BlockModel
from blockattn_rag.model.loading import (
    default_device,
    load_config,
    load_model,
    load_tokenizer,
    resolve_name,
)
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import save_model, shared_tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(shared_tiny_llama(), tmp_path_factory.mktemp("model"))


def test_a_model_loaded_by_path_is_the_one_that_was_saved(saved: Path) -> None:
    loaded = BlockModel.from_pretrained(saved, device="cpu")
    ready = shared_tiny_llama().state_dict()
    found = loaded.hf_model.state_dict()
    assert all(torch.equal(ready[name], tensor) for name, tensor in found.items())
    assert loaded.name == str(saved)
    assert not loaded.hf_model.training
    assert not loaded.is_block_tuned


def test_a_model_object_needs_a_tokenizer(saved: Path) -> None:
    with pytest.raises(ValueError, match="requires its tokenizer: pass tokenizer="):
        BlockModel.from_pretrained(shared_tiny_llama())
    assert BlockModel.from_pretrained(shared_tiny_llama(), tokenizer=saved).tokenizer.prefix_ids


def test_sixteen_bit_weights_become_float32_on_the_cpu_by_default(tmp_path: Path) -> None:
    copy.deepcopy(shared_tiny_llama()).bfloat16().save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype == torch.float32
    assert load_model(tmp_path, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(tmp_path, device="cpu", dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}])
def test_auto_keeps_float32_files_exact_on_the_cpu(tmp_path: Path, options: dict[str, Any]) -> None:
    shared_tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    loaded = load_model(tmp_path, device="cpu", **options).state_dict()
    weights = shared_tiny_llama().state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in weights.items())


def test_the_mark_of_block_fine_tuning_survives_saving(tmp_path: Path) -> None:
    model = copy.deepcopy(shared_tiny_llama())
    model.config.block_attention = {"version": 1}
    save_model(model, tmp_path)
    assert BlockModel.from_pretrained(tmp_path, device="cpu").is_block_tuned


def test_an_adapter_is_merged_into_its_base(saved: Path, tmp_path: Path) -> None:
    base = copy.deepcopy(shared_tiny_llama())
    config = LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    tuned: Any = get_peft_model(base, config)
    save_model(tuned, tmp_path, save_embedding_layers=False)
    settings_file = tmp_path / "adapter_config.json"
    settings = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({**settings, "base_model_name_or_path": str(saved)}))
    (tmp_path / "block_attention.json").write_text('{"version": 1}')

    loaded = BlockModel.from_pretrained(tmp_path, device="cpu")
    merged = BlockModel(tuned.merge_and_unload(), tiny_tokenizer())
    assert loaded.is_block_tuned
    assert loaded.fingerprint == merged.fingerprint
    assert all(parameter.requires_grad for parameter in loaded.hf_model.parameters())
    plain = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    assert loaded.fingerprint != plain.fingerprint
    loaded.hf_model.save_pretrained(tmp_path / "merged")
    loaded.tokenizer.tokenizer.save_pretrained(tmp_path / "merged")
    again = BlockModel.from_pretrained(tmp_path / "merged", device="cpu")
    assert again.is_block_tuned
    # An adapter changes the fingerprint of the files.
    assert again.fingerprint != loaded.fingerprint
    assert load_config(tmp_path).hidden_size == 32
    quantized: Any = BitsAndBytesConfig
    with pytest.raises(ValueError, match="cannot be merged into quantized weights"):
        load_model(tmp_path, device="cpu", quantization_config=quantized(load_in_4bit=True))


def test_the_error_for_a_folder_without_a_model_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model: expected config\.json or adapter"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_name(tmp_path) == str(tmp_path)


def test_a_folder_may_contain_only_a_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert BlockTokenizer(loaded).fingerprint == BlockTokenizer(tiny_tokenizer()).fingerprint
    with pytest.raises(FileNotFoundError, match="contains no model"):
        load_config(tmp_path)


@pytest.mark.parametrize(("name", "meant"), [("bundeld", "bundled"), ("smolm2", "smollm2")])
def test_a_misspelled_name_is_reported_without_asking_the_hub(name: str, meant: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"Unknown model '{name}'; did you mean '{meant}'"):
        load_config(name)
    assert (
        resolve_name("bundle-7b/chat") == resolve_name(Path("bundle-7b/chat")) == "bundle-7b/chat"
    )


def test_an_environment_variable_sets_the_device_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKATTN_RAG_DEVICE", "meta")
    assert default_device() == "meta"
