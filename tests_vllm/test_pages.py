"""Pages are read as they were written, whatever the memory layout of the backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.errors import ServingError
from blockattn_rag.server.vllm.pages import KVGroup, LayerPages

PAGES, HEADS, TOKENS, KEY, VALUE = 6, 2, 16, 8, 4
GROUP = KVGroup(0, TOKENS)


class Backend:
    """Attention backend that permutes the elements of each page. ``rounds``: Also rounds them."""

    def __init__(self, rounds: bool = False) -> None:
        order = torch.Generator().manual_seed(1)
        self.order = torch.randperm(TOKENS * HEADS * (KEY + VALUE), generator=order)
        self.rounds = rounds

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        numbers = torch.arange(len(self.order))
        split = TOKENS * HEADS * KEY
        keys = numbers[:split].view(TOKENS, HEADS, KEY)
        values = numbers[split:].view(TOKENS, HEADS, VALUE)
        for token, slot in enumerate(slots.tolist()):
            page, place = divmod(slot, TOKENS)
            for states, places in ((key, keys), (value, values)):
                written = states[token].to(kv_cache.dtype)
                written = (written / 2).floor() * 2 if self.rounds else written
                kv_cache.view(PAGES, -1)[page, self.order[places[place]]] = written


def layer_of(backend: Backend, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(
        impl=backend,
        num_kv_heads=HEADS,
        head_size=KEY,
        head_size_v=VALUE,
        kv_cache=torch.full((PAGES, HEADS, TOKENS, KEY + VALUE), 7.0).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, TOKENS, 2 * TOKENS + 3])
def test_written_states_are_read_back(dtype: torch.dtype, tokens: int) -> None:
    layer = layer_of(Backend(), dtype)
    pages = LayerPages(layer, GROUP)
    table = torch.tensor([4, 1, 3])
    slots = (table[:, None] * TOKENS + torch.arange(TOKENS)).flatten()[:tokens]
    keys = torch.randn(HEADS, tokens, KEY).to(dtype)
    values = torch.randn(HEADS, tokens, VALUE).to(dtype)
    pages.measure({})
    assert bool((layer.kv_cache == 7).all())  # measuring changes nothing
    pages.write(keys, values, slots)
    found_keys, found_values = pages.read(slots)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)


def test_layers_with_the_same_layout_are_measured_once() -> None:
    layouts: dict[tuple[Any, ...], Tensor] = {}
    first, second = (LayerPages(layer_of(Backend()), GROUP) for _ in range(2))
    for pages in (first, second):
        pages.measure(layouts)
    assert second._places is first._places
    LayerPages(layer_of(Backend(), torch.float16), GROUP).measure(layouts)
    assert len(layouts) == 2


def test_a_backend_that_changes_stored_values_is_refused() -> None:
    with pytest.raises(ServingError, match="changes the keys and values that it stores"):
        LayerPages(layer_of(Backend(rounds=True)), GROUP).measure({})


def test_a_cache_of_eight_bits_is_refused() -> None:
    with pytest.raises(ServingError, match="--kv-cache-dtype auto"):
        LayerPages(layer_of(Backend(), torch.float8_e4m3fn), GROUP).measure({})


class LatentBackend:
    """vLLM's reference backend for latent attention: a latent and a rotary key per token."""

    def do_kv_cache_update(
        self, latent: Tensor, key: Tensor, kv_cache: Tensor, slots: Tensor, dtype: str, scale: float
    ) -> None:
        assert (dtype, scale) == ("auto", 1.0)
        kv_cache.view(-1, VALUE + KEY)[slots] = torch.cat([latent, key.squeeze(1)], dim=1)


def latent_layer() -> Any:
    return SimpleNamespace(
        impl=LatentBackend(),
        num_kv_heads=1,
        head_size=VALUE + KEY,
        kv_lora_rank=VALUE,
        kv_cache=torch.zeros(PAGES, TOKENS, VALUE + KEY),
        kv_cache_dtype="auto",
        _k_scale=1.0,
    )


@pytest.mark.parametrize("interleaves", [False, True])
def test_latents_and_rotary_keys_are_read_back(interleaves: bool) -> None:
    layer = latent_layer()
    pages = LayerPages(layer, GROUP, interleaves_keys=interleaves)
    assert pages.sizes == (1, KEY, VALUE)
    pages.measure({})
    keys, latents = torch.randn(1, 3, KEY), torch.randn(1, 3, VALUE)
    slots = torch.arange(3) + TOKENS
    pages.write(keys, latents, slots)
    stored = layer.kv_cache[1, :3, VALUE:]
    expected = keys[0, :, [0, 4, 1, 5, 2, 6, 3, 7]] if interleaves else keys[0]
    assert torch.equal(stored, expected)
    found_keys, found_latents = pages.read(slots)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_latents, latents)


def test_groups_have_their_own_tables_and_page_sizes() -> None:
    tables = [[7, 2], [0, 0, 9, 4]]
    full, windowed = KVGroup(0, 8), KVGroup(1, 4)
    assert [group.first_token(tables) for group in (full, windowed)] == [0, 8]
    assert KVGroup(0, 4).first_token([[0, 0]]) == 8  # no token is in a page
    device = torch.device("cpu")
    assert full.slots(tables, range(6, 11), device).tolist() == [62, 63, 16, 17, 18]
    assert windowed.slots(tables, range(9, 14), device).tolist() == [37, 38, 39, 16, 17]
