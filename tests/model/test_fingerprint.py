"""The fingerprint depends on everything that affects keys and values, and not on names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.fingerprint import fingerprint_of
from blockattn_rag.model.kinds import LayerKind
from blockattn_rag.model.packing import pack_linears
from blockattn_rag.model.relay_attention import enable_relay
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer
from tests.processes import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter one was active:UserWarning"),
    pytest.mark.filterwarnings("ignore:Merge lora module:UserWarning"),
]
TOKENIZER = BlockTokenizer(tiny_tokenizer())
IDS = list(range(40, 60))


def fingerprint(model: Any, tokenizer: BlockTokenizer = TOKENIZER) -> str:
    return fingerprint_of(model, tokenizer)


ORIGINAL = fingerprint(shared_tiny_llama())


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(shared_tiny_llama())


def block_model(hf_model: Any) -> BlockModel:
    return BlockModel(hf_model, tiny_tokenizer())


def states(model: BlockModel) -> list[Tensor]:
    kv = next(model.encode([EncodeRequest(IDS, "", "")]))[0]
    assert kv.fingerprint == model.fingerprint
    return [*kv.keys, *kv.values]


# -- weights, config, dtype, tokenizer -------------------------------------------------------------


@torch.no_grad()
def next_float(model: Any) -> None:
    """Change one bit of one weight."""
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0].self_attn, layers[1].self_attn = layers[1].self_attn, layers[0].self_attn


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda m: m.bfloat16(),
    "one bit": next_float,
    "swapped layers": swap_layers,
    "buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(2),
    "config": lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
    "other weights": lambda m: m.load_state_dict(tiny_model(seed=1).state_dict()),
    "empty buffer": lambda m: m.register_buffer("nothing", torch.empty(0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_give_another_fingerprint_and_are_refused_in_use(model: Any, name: str) -> None:
    in_use = block_model(model)
    assert in_use.fingerprint == ORIGINAL
    CHANGES[name](model)
    assert fingerprint(model) != ORIGINAL
    assert in_use.fingerprint == ORIGINAL
    if name != "buffer":  # LongRoPE changes this buffer itself.
        with pytest.raises(UnsupportedModelError, match="have changed since it was loaded"):
            states(in_use)


def test_a_model_that_changes_before_its_fingerprint_is_known_is_refused(model: Any) -> None:
    in_use = block_model(model)
    next_float(model)
    with pytest.raises(UnsupportedModelError, match="create a new engine"):
        in_use.fingerprint  # noqa: B018 -- computed on the first access
    assert block_model(model).fingerprint != ORIGINAL


def test_the_same_seed_gives_the_same_weights_and_fingerprint() -> None:
    tied = fingerprint(tiny_model(tie_word_embeddings=True))
    assert fingerprint(tiny_model()) == ORIGINAL != tied


def test_another_tokenizer_has_another_fingerprint(model: Any) -> None:
    assert fingerprint(model, BlockTokenizer(tiny_tokenizer(bos=False))) != ORIGINAL


def quantized(seed: int) -> Any:
    """Return a model with one layer whose int8 weights are not parameters."""
    model = copy.deepcopy(shared_tiny_llama())
    torch.manual_seed(seed)
    model.model.layers[0].mlp.up_proj.weight.data.normal_()
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_int8_weights_affect_the_fingerprint() -> None:
    if torch.backends.quantized.supported_engines == ["none"]:
        pytest.skip("this PyTorch has no quantized kernels")
    one, other = quantized(1), quantized(2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(quantized(1))


class Extra(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def get_extra_state(self) -> Any:
        return self._state


def test_extra_state_of_modules_affects_the_fingerprint(model: Any) -> None:
    found = {ORIGINAL}
    for state in ({"scale": 1.0}, {"scale": [2.0]}, torch.tensor([1.0]), torch.eye(2).to_sparse()):
        model.model.layers[0].extra = Extra(state)
        found.add(fingerprint(model))
    assert len(found) == 5


# -- adapters --------------------------------------------------------------------------------------


def add_adapter(model: Any, name: str, alpha: int = 8, seed: int = 0) -> None:
    torch.manual_seed(seed)
    targets = ["k_proj", "v_proj"]
    config = LoraConfig(r=2, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
    model.add_adapter(config, adapter_name=name)
    model.eval()


def adapted() -> Any:
    model = copy.deepcopy(shared_tiny_llama())
    add_adapter(model, "one", seed=1)
    add_adapter(model, "two", seed=2)
    model.set_adapter("one")
    return model


def each_layer(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "set_scale"):
                call(module)

    return change


SWITCHES: dict[str, Callable[[Any], None]] = {
    "disabled": lambda m: m.disable_adapters(),
    "another": lambda m: m.set_adapter("two"),
    "both": lambda m: m.set_adapter(["one", "two"]),
    "rescaled": each_layer(lambda layer: layer.set_scale("one", 3.0)),
    "merged": each_layer(lambda layer: layer.merge(adapter_names=["two"])),
    "deleted": lambda m: m.delete_adapter("one"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_switching_adapters_is_refused(switch: Callable[[Any], None]) -> None:
    model = block_model(adapted())
    with_one = states(model)
    switch(model.hf_model)
    with pytest.raises(UnsupportedModelError, match="adapters or config of"):
        states(model)
    again = block_model(model.hf_model)
    assert again.fingerprint != model.fingerprint
    assert any(not torch.equal(a, b) for a, b in zip(states(again), with_one, strict=True))


def test_switching_back_to_the_first_adapter_is_accepted() -> None:
    model = block_model(adapted())
    with_one = states(model)
    model.hf_model.disable_adapters()
    model.hf_model.enable_adapters()
    assert all(torch.equal(a, b) for a, b in zip(states(model), with_one, strict=True))


def test_the_engine_refuses_to_run_with_another_adapter() -> None:
    engine = BlockAttentionEngine(block_model(adapted()))
    prompt = ["System.", "Passage.", "Which?"]
    engine.generate(prompt, max_new_tokens=1)
    stored = {*engine.store.keys()}
    engine.model.hf_model.set_adapter("two")
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(prompt, max_new_tokens=1),
        lambda: engine.generate_batch([prompt, ["Which?"]], max_new_tokens=1),
        lambda: engine.generate(prompt, mode="full", max_new_tokens=1),
        lambda: engine.answer_logits(prompt, [1]),
        lambda: engine.encode(["Another passage."]),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match="have changed since it was loaded"):
            call()
    assert {*engine.store.keys()} == stored
    other = BlockAttentionEngine(block_model(engine.model.hf_model), engine.store)
    assert other.generate(prompt, max_new_tokens=1).stats.hits == 0


# -- what does not affect keys and values ----------------------------------------------------------


def renamed(model: Any) -> None:
    model.config._name_or_path = "another/name"
    model.config.block_attention = {"note": "says who trained it"}
    model.config.eos_token_id = 3


def partly_offloaded(model: Any) -> None:
    """Offload the weights of two layers, which are then loaded for each forward pass."""
    from accelerate import cpu_offload

    for index in (1, 2):
        cpu_offload(model.model.layers[index], execution_device=torch.device("cpu"))
    assert model.model.layers[1].mlp.up_proj.weight.is_meta


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "renamed": renamed,
    "offloaded by accelerate": partly_offloaded,
    "packed": pack_linears,
    "relaying": enable_relay,
    "in use": lambda m: m(torch.tensor([IDS]), output_hidden_states=True, output_attentions=True),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_other_changes_do_not_affect_the_fingerprint(model: Any, name: str) -> None:
    in_use = block_model(model)
    NEUTRAL[name](model)
    assert fingerprint(model) == ORIGINAL
    if name != "offloaded by accelerate":
        assert states(in_use)
        assert in_use.supports_relay
        in_use.check_unchanged()


def test_saving_and_loading_keeps_the_fingerprint(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    load: Any = AutoModelForCausalLM.from_pretrained
    for options in ({}, {"device_map": "cpu"}, {"attn_implementation": "eager"}):
        assert fingerprint(load(tmp_path, dtype=torch.float32, **options)) == ORIGINAL


def print_fingerprints() -> None:
    print(ORIGINAL, fingerprint(adapted()))


def test_another_process_computes_the_same_fingerprint() -> None:
    assert run(print_fingerprints).stdout.split() == [ORIGINAL, fingerprint(adapted())]


# -- autocast and training mode --------------------------------------------------------------------


def test_encoding_under_autocast_is_refused(model: Any) -> None:
    in_use = block_model(model)
    before = in_use.fingerprint
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"Autocast to torch\.bfloat16 is enabled"):
            next(in_use.encode([EncodeRequest(IDS, "", "")]))
        with pytest.raises(ValueError, match=r"Autocast to torch\.bfloat16 is enabled"):
            block_model(copy.deepcopy(model))
        assert in_use.fingerprint == before  # still usable for look-ups
    assert states(in_use)[0].dtype == torch.float32


def test_encoding_in_training_mode_is_refused(model: Any) -> None:
    in_use = block_model(model)
    before = in_use.fingerprint
    model.train(True)
    with pytest.raises(ValueError, match="LlamaForCausalLM is in training mode"):
        next(in_use.encode([EncodeRequest(IDS, "", "")]))
    model.train(False)
    assert in_use.fingerprint == before
    assert states(in_use)


def test_layers_other_than_attention_affect_the_fingerprint() -> None:
    model = tiny_model()
    plain = fingerprint_of(model, TOKENIZER)
    attention = [LayerKind(), LayerKind("windowed", 16)]
    assert fingerprint_of(model, TOKENIZER, attention) == plain  # unchanged since earlier releases
    # Some versions of transformers do not list layers that share keys and values.
    assert fingerprint_of(model, TOKENIZER, [*attention, LayerKind("shared")]) == plain
    others = [LayerKind("latent"), LayerKind("none", has_state=True)]
    found = {fingerprint_of(model, TOKENIZER, [*attention, other]) for other in others}
    assert len(found | {plain}) == 3
