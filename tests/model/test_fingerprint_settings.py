"""The fingerprint covers what no weight and no config tells: adapters, scales, hooks, packing."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.fingerprint import Identity
from blockattn_rag.model.packing import pack_linears
from blockattn_rag.model.relay_attention import enable_relay
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter one was active:UserWarning"),
]
TOKENIZER = BlockTokenizer(tiny_tokenizer())
IDS = list(range(40, 60))


def fingerprint(model: Any) -> str:
    return Identity(model, TOKENIZER).fingerprint


ORIGINAL = fingerprint(shared_tiny_llama())


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(shared_tiny_llama())


def add_adapter(model: Any, name: str, alpha: int = 8, seed: int = 0) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=2, lora_alpha=alpha, target_modules=["k_proj", "v_proj"], init_lora_weights=False
    )
    model.add_adapter(config, adapter_name=name)
    model.eval()


def states(model: BlockModel) -> list[Tensor]:
    kv = next(model.encode([EncodeRequest(IDS, "", "")]))[0]
    return [*kv.keys, *kv.values]


# -- what changes keys and values ------------------------------------------------------------------


def set_on(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


class Steer:
    """A hook that is an object, by ``alpha``."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output + self.alpha

    def method(self, module: Any, args: Any, output: Any) -> Any:
        return output * (1 + self.alpha)


class Slotted:
    """Holds a number where nobody can look for it."""

    __slots__ = ("alpha",)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha


def closure(held: Any) -> Callable[..., Any]:
    alpha = (lambda: held.alpha) if isinstance(held, Slotted) else (lambda: held)

    def hook(module: Any, args: Any, output: Any) -> Any:
        return output + alpha()

    return hook


def with_default(module: Any, args: Any, output: Any, alpha: float = 0.5) -> Any:
    return output + alpha


def scaled(alpha: float, module: Any, args: Any, output: Any) -> Any:
    return output * alpha


def double_input(module: Any, args: Any) -> Any:
    return (args[0] * 2,)


def hooked(hook: Any, path: str = "model.layers.0.mlp") -> Callable[[Any], None]:
    def set_up(model: Any) -> None:
        model.get_submodule(path).register_forward_hook(hook)

    return set_up


def replaced_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.up_proj(x)), mlp)


def patched_class(model: Any) -> None:
    """Another class of the same name: no setting tells, only what comes out."""
    mlp = model.model.layers[0].mlp
    own = type(mlp)

    def forward(self: Any, x: Tensor) -> Any:
        return 3 * own.forward(self, x)

    mlp.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})


def plain_activation(model: Any) -> None:
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = nn.functional.relu


FIRST = "model.layers.0"
CHANGES: dict[str, Callable[[Any], None]] = {
    "scaling": set_on(f"{FIRST}.self_attn", "scaling", 0.9),
    "variance_epsilon": set_on(f"{FIRST}.input_layernorm", "variance_epsilon", 0.1),
    "attention_scaling": set_on("model.rotary_emb", "attention_scaling", 1.5),
    "activation": set_on(f"{FIRST}.mlp", "act_fn", nn.ReLU()),
    "activation function": plain_activation,
    "hook": hooked(with_default),
    "hook with closure over a number": hooked(closure(0.5)),
    "hook with closure over another number": hooked(closure(0.75)),
    "hook with closure over a tensor": hooked(closure(torch.tensor(0.5))),
    "hook with closure over another tensor": hooked(closure(torch.tensor(0.75))),
    "hook with closure over an object": hooked(closure(Slotted(0.5))),
    "hook with closure over another object": hooked(closure(Slotted(-3.0))),
    "hook that is an object": hooked(Steer(0.5)),
    "hook that is another object": hooked(Steer(0.25)),
    "hook that is a method": hooked(Steer(0.5).method),
    "hook that is a partial": hooked(functools.partial(scaled, 0.5)),
    "hook that is another partial": hooked(functools.partial(scaled, 0.25)),
    "hook elsewhere": hooked(with_default, "model.layers.1.mlp"),
    "hook on a projection of the last layer": hooked(
        with_default, "model.layers.2.self_attn.v_proj"
    ),
    "hook before": lambda m: m.model.layers[0].mlp.register_forward_pre_hook(double_input),
    "replaced forward": replaced_forward,
    "patched class": patched_class,
    "tensor that is no buffer": set_on(FIRST, "shift", torch.tensor(1.0)),
    "adapter": lambda m: add_adapter(m, "one"),
    "adapter of other alpha": lambda m: add_adapter(m, "one", alpha=16),
    "adapter of other weights": lambda m: add_adapter(m, "one", seed=1),
}


def test_every_change_of_what_modules_do_has_a_fingerprint_of_its_own() -> None:
    found = {"unchanged": ORIGINAL}
    for name, change in CHANGES.items():
        model = copy.deepcopy(shared_tiny_llama())
        change(model)
        found[name] = fingerprint(model)
    twins = {value: name for name, value in found.items()}
    assert len(twins) == len(found), set(found) - set(twins.values())


def test_hooks_for_all_modules_count(model: Any) -> None:
    def on_norms(module: Any, args: Any, output: Any) -> Any:
        return output * 2 if "RMSNorm" in type(module).__name__ else None

    handle = nn.modules.module.register_module_forward_hook(on_norms)
    try:
        assert fingerprint(model) != ORIGINAL
    finally:
        handle.remove()
    assert fingerprint(model) == ORIGINAL


# -- adapters --------------------------------------------------------------------------------------


def adapted() -> Any:
    model = copy.deepcopy(shared_tiny_llama())
    add_adapter(model, "one", seed=1)
    add_adapter(model, "two", seed=2)
    model.set_adapter("one")
    return model


def rescaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("one", 3.0)


SWITCHES: dict[str, Callable[[Any], None]] = {
    "disabled": lambda m: m.disable_adapters(),
    "another": lambda m: m.set_adapter("two"),
    "both": lambda m: m.set_adapter(["one", "two"]),
    "rescaled": rescaled,
    "deleted": lambda m: m.delete_adapter("one"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())
def test_a_new_model_with_adapters_switched_shares_no_fingerprint(
    switch: Callable[[Any], None],
) -> None:
    hf_model = adapted()
    before = BlockModel(hf_model, tiny_tokenizer())
    with_one = before.fingerprint, states(before)
    switch(hf_model)
    after = BlockModel(hf_model, tiny_tokenizer())
    assert any(not torch.equal(a, b) for a, b in zip(states(after), with_one[1], strict=True))
    assert after.fingerprint != with_one[0]


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())
def test_adapters_switched_on_a_model_in_use_change_its_fingerprint_at_once(
    switch: Callable[[Any], None],
) -> None:
    model = BlockModel(adapted(), tiny_tokenizer())
    before = model.fingerprint
    assert next(model.encode([EncodeRequest(IDS, "", "")]))[0].fingerprint == before
    switch(model.hf_model)
    assert model.fingerprint != before
    assert next(model.encode([EncodeRequest(IDS, "", "")]))[0].fingerprint == model.fingerprint
    fresh = BlockModel(model.hf_model, tiny_tokenizer())
    assert fresh.fingerprint == model.fingerprint


def test_an_adapter_switched_back_has_its_old_fingerprint() -> None:
    model = BlockModel(adapted(), tiny_tokenizer())
    before = model.fingerprint
    hf_model: Any = model.hf_model
    hf_model.set_adapter("two")
    assert model.fingerprint != before
    hf_model.set_adapter("one")
    assert model.fingerprint == before
    hf_model.disable_adapters()
    assert model.fingerprint != before
    hf_model.enable_adapters()
    assert model.fingerprint == before


def test_an_adapter_that_is_added_to_a_model_in_use_computes_without_dropout() -> None:
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    before = model.fingerprint
    hf_model: Any = model.hf_model
    config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["v_proj"], init_lora_weights=False)
    hf_model.add_adapter(config)
    assert model.fingerprint != before
    first, second = states(model), states(model)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


LIVE: dict[str, Callable[[Any], None]] = {
    "scaling": CHANGES["scaling"],
    "hook": CHANGES["hook"],
    "hook before": CHANGES["hook before"],
    "activation": CHANGES["activation"],
    "replaced forward": replaced_forward,
    "weights": lambda m: m.load_state_dict(tiny_model(seed=1).state_dict()),
}


@pytest.mark.parametrize("change", LIVE.values(), ids=LIVE.keys())
def test_what_is_set_on_a_model_in_use_changes_its_fingerprint_at_once(
    change: Callable[[Any], None],
) -> None:
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    before = model.fingerprint
    change(model.hf_model)
    assert model.fingerprint != before


def test_rotation_that_is_set_on_a_model_in_use_is_measured_again() -> None:
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    before, layouts = model.fingerprint, model.profile.layouts
    hf_model: Any = model.hf_model
    hf_model.model.rotary_emb.inv_freq *= 0.5
    assert model.fingerprint != before
    assert not model.profile.layouts[0].same_as(layouts[0])


# -- packed weights --------------------------------------------------------------------------------


def quantised(seed: int) -> Any:
    model = copy.deepcopy(shared_tiny_llama())
    # Only weights that are packed differ: every parameter and buffer is the same.
    torch.manual_seed(seed)
    model.model.layers[0].mlp.up_proj.weight.data.normal_()
    kinds = {nn.Linear}
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(model, kinds, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_int8_weights_count() -> None:
    if "none" in torch.backends.quantized.supported_engines and (
        len(torch.backends.quantized.supported_engines) == 1
    ):
        pytest.skip("this PyTorch has no quantised kernels")
    one, other = quantised(1), quantised(2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(quantised(1))


def test_extra_state_of_modules_counts(model: Any) -> None:
    class Extra(nn.Module):
        def __init__(self, state: Any) -> None:
            super().__init__()
            self._state_cache = state  # by name no setting

        def get_extra_state(self) -> Any:
            return self._state_cache

    found = {ORIGINAL}
    for state in ({"scale": 1.0}, {"scale": 2.0}, torch.tensor([1.0]), torch.tensor([2.0])):
        model.model.layers[0].extra = Extra(state)
        found.add(fingerprint(model))
    assert len(found) == 5


# -- what does not ---------------------------------------------------------------------------------


def dispatched(model: Any) -> Any:
    from accelerate import dispatch_model

    return dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


def partly_offloaded(model: Any) -> Any:
    """Two layers' weights lie elsewhere, and come for each forward."""
    from accelerate import cpu_offload

    for index in (1, 2):
        cpu_offload(model.model.layers[index], execution_device=torch.device("cpu"))
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    return model


def with_hidden_states(model: Any) -> Any:
    model(torch.tensor([IDS]), output_hidden_states=True, output_attentions=True)
    return model


def packed(model: Any) -> Any:
    pack_linears(model)
    return model


def relaying(model: Any) -> Any:
    enable_relay(model)
    return model


def to_be_trained(model: Any) -> Any:
    renamed = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.20
    (renamed or model.gradient_checkpointing_enable)()
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "dispatched by accelerate": dispatched,
    "offloaded by accelerate": partly_offloaded,
    "hidden states were asked for": with_hidden_states,
    "packed": packed,
    "relaying": relaying,
    "to be trained": to_be_trained,
    "eager attention": eager,
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("way", NEUTRAL.values(), ids=NEUTRAL.keys())
def test_what_leaves_keys_and_values_alone_leaves_the_fingerprint(
    model: Any, way: Callable[[Any], Any]
) -> None:
    assert fingerprint(way(model)) == ORIGINAL


def test_a_model_that_was_saved_and_loaded_has_its_fingerprint(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    load: Any = AutoModelForCausalLM.from_pretrained
    for options in ({}, {"device_map": "cpu"}, {"attn_implementation": "eager"}):
        assert fingerprint(load(tmp_path, dtype=torch.float32, **options)) == ORIGINAL


def test_records_of_runs_are_no_settings(model: Any) -> None:
    class Counts:
        calls = 0

        def __call__(self, module: Any, args: Any, output: Any) -> None:
            self.calls += 1
            module.calls = self.calls

    def counted() -> Any:
        other = copy.deepcopy(model)
        other.model.layers[0].mlp.calls = 0
        other.model.layers[0].mlp.register_forward_hook(Counts())
        return other

    block_model = BlockModel(counted(), tiny_tokenizer())
    before = block_model.fingerprint
    for _ in range(3):
        states(block_model)
    assert block_model.fingerprint == before
    assert BlockModel(counted(), tiny_tokenizer()).fingerprint == before


@pytest.mark.parametrize("threads", [1, 2])
def test_another_process_finds_the_same_fingerprint(threads: int, tmp_path: Path) -> None:
    """With other hashes of strings, other addresses, another number of threads."""
    script = tmp_path / "other.py"
    script.write_text(
        "import torch\n"
        f"torch.set_num_threads({threads})\n"
        "from tests.model import test_fingerprint_settings as t\n"
        "print(t.ORIGINAL)\n"
        "for name in ('hook', 'hook with closure over a tensor', 'adapter', 'replaced forward'):\n"
        "    model = t.copy.deepcopy(t.shared_tiny_llama())\n"
        "    t.CHANGES[name](model)\n"
        "    print(t.fingerprint(model))\n",
        encoding="utf-8",
    )
    root = Path(__file__).parents[2]
    found = [
        subprocess.run(
            [sys.executable, str(script)],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert found[0][0] == ORIGINAL
    assert len(set(found[0])) == 5


# -- autocast --------------------------------------------------------------------------------------


def test_under_autocast_nothing_is_encoded() -> None:
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    before = model.fingerprint
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"autocast to torch\.bfloat16 is on"):
            next(model.encode([EncodeRequest(IDS, "", "")]))
        with pytest.raises(ValueError, match=r"autocast to torch\.bfloat16 is on"):
            BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
        assert model.fingerprint == before  # to look up what is stored
    assert states(model)[0].dtype == torch.float32


def test_in_training_mode_nothing_is_encoded() -> None:
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    before = model.fingerprint
    model.hf_model.train(True)
    with pytest.raises(ValueError, match="LlamaForCausalLM is in training mode"):
        next(model.encode([EncodeRequest(IDS, "", "")]))
    model.hf_model.train(False)
    assert model.fingerprint == before
    assert states(model)


def test_a_setting_of_the_config_that_changes_on_a_model_in_use_is_seen() -> None:
    model = BlockModel(tiny_model("mistral", sliding_window=None), tiny_tokenizer())
    before = model.fingerprint
    model.config.sliding_window = 4
    assert model.fingerprint != before
    model.config.sliding_window = None
    assert model.fingerprint == before
    model.config.eos_token_id = 3  # decides no keys and values
    assert model.fingerprint == before
