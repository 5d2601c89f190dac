"""Options of the connector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.model import BlockModel
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.profile import ModelProfile, profile_of
from blockattn_rag.server.shares import Share
from blockattn_rag.store import RedisStore
from tests.models import save_model, shared_tiny_llama
from tests.recipes import recipe_of
from tests.server.profiles import make_profile

PROFILE = make_profile()
GIVEN: dict[str, Any] = {"store": "s3://kv/llama"}


def test_unset_options_have_defaults() -> None:
    config = ServingConfig.parse(GIVEN)
    assert config.tenant_secret is None
    assert config.nearer_tiers(PROFILE, Share.of(PROFILE)) == {"memory": "memory:8GiB"}


@pytest.mark.parametrize("option", [False, True, "system", "sources"])
def test_recognition_has_four_settings(option: Any) -> None:
    assert ServingConfig.parse(GIVEN | {"recognize": option}).recognize == option


def test_each_rank_has_its_own_tiers() -> None:
    config = ServingConfig.parse(GIVEN | {"memory": "1GiB", "disk": "/nvme"})
    folder = f"/nvme/{'f' * 16}/layers-0-2-heads-1-2"
    tiers = config.nearer_tiers(PROFILE, Share.of(PROFILE, 1, 2))
    assert [*tiers.items()] == [("memory", "memory:1GiB"), ("disk", folder)]


def test_tier_folders_depend_on_the_model_and_the_share() -> None:
    config = ServingConfig.parse(GIVEN | {"disk": "/nvme"})
    other = make_profile(fingerprint="0" * 64)
    shares = [Share.of(PROFILE, rank, 2) for rank in (0, 1)]
    shares += [Share.of(PROFILE, 0, 2, range(1)), Share.of(PROFILE, 0, 2, range(1, 2))]
    folders = {config.nearer_tiers(PROFILE, share)["disk"] for share in shares}
    assert len({*folders, config.nearer_tiers(other, shares[0])["disk"]}) == 5


def test_ranks_have_their_own_prefixes_in_a_cache() -> None:
    config = ServingConfig.parse(GIVEN | {"disk": "/nvme", "cache": "redis://valkey:6379/0"})
    tiers = [config.nearer_tiers(PROFILE, Share.of(PROFILE, rank, 2)) for rank in (0, 1)]
    assert [*tiers[0]] == ["memory", "disk", "cache"]
    caches = [tier["cache"] for tier in tiers]
    assert [repr(one) for one in caches] == ["RedisStore('redis://valkey:6379/0')"] * 2
    assert len({one._prefix for one in caches if isinstance(one, RedisStore)}) == 2


def test_private_memory_is_converted_to_tokens() -> None:
    profile = make_profile()  # 128 bytes per token: 2 layers, 2 heads, 4 + 4 channels
    config = ServingConfig.parse(GIVEN | {"private_memory": "1KiB"})
    assert config.private_tokens(profile) == 8
    assert ServingConfig.parse(GIVEN).private_tokens(profile) == (4 << 30) // 128


def test_a_read_only_server_may_encode_for_its_memory() -> None:
    assert ServingConfig.parse(GIVEN).encodes
    assert ServingConfig.parse(GIVEN | {"private_memory": "0"}).encodes
    assert ServingConfig.parse(GIVEN | {"read_only": True}).encodes
    assert not ServingConfig.parse(GIVEN | {"read_only": True, "private_memory": "0"}).encodes


def test_lists_of_namespaces_are_parsed() -> None:
    config = ServingConfig.parse(GIVEN | {"read_namespaces": ["shared"]})
    assert config.read_namespaces == ("shared",)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"storre": "x"}, "kv_connector_extra_config has the unknown field 'storre'"),
        ({"store": "memory:1GiB"}, "store: Expected a path or an address that all processes"),
        ({"private_memory": "much"}, "Expected a size such as 2GiB"),
        ({"disk": ""}, "disk should have at least 1 character"),
        ({"cache": "s3://kv"}, "cache: Expected the address of a Redis or Valkey server"),
        ({"read_namespaces": "shared"}, "read_namespaces should be a valid list"),
        ({"read_namespaces": ["a b"]}, "A namespace consists of"),
        ({"load_deadline_s": 0}, "load_deadline_s should be greater than 0"),
        ({"recognize": "everywhere"}, "recognize"),
        ({"kv_dtype": "fp8"}, "kv_dtype should be 'model' or 'int8'"),
    ],
)
def test_invalid_options_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingConfig.parse(GIVEN | changed)


def test_a_store_is_required() -> None:
    with pytest.raises(ValueError, match="is missing the field 'store'; add it"):
        ServingConfig.parse({})


def test_the_recipe_is_part_of_the_profile(tmp_path: Path) -> None:
    save_model(shared_tiny_llama(), tmp_path / "model")
    model = BlockModel.from_pretrained(tmp_path / "model", device="cpu")
    recipe = recipe_of(model)
    recipe.save(tmp_path / "other" / "recipe")

    def profile(**given: str) -> tuple[ModelProfile, Recipe]:
        config = ServingConfig.parse({"store": str(tmp_path / "kv"), **given})
        return config.profile_of(str(tmp_path / "model"), torch.float32)

    stock = Recipe("head", recompute=0.1)
    assert profile() == (profile_of(model, stock), stock)
    assert profile(recipe="none")[0] == profile_of(model, Recipe())
    folder = str(tmp_path / "other" / "recipe")
    assert profile(recipe=folder) == (profile_of(model, recipe), recipe)
    recipe.save(tmp_path / "recipe")  # next to the store
    assert profile()[1] == recipe
    with pytest.raises(ValueError, match="Found no recipe at nowhere"):
        profile(recipe="nowhere")
    other = replace(recipe, fingerprints=("0" * 64,))
    other.save(tmp_path / "foreign" / "recipe")
    with pytest.raises(ValueError, match=r"belongs to .* with the fingerprint"):
        profile(recipe=str(tmp_path / "foreign" / "recipe"))


def test_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServingConfig.parse(GIVEN | {"tenant_secret_env": "SECRET_OF_TENANTS"})
    monkeypatch.setenv("SECRET_OF_TENANTS", "s3cret")
    assert config.tenant_secret == "s3cret"
    assert "s3cret" not in repr(config)
    monkeypatch.setenv("SECRET_OF_TENANTS", "")
    with pytest.raises(ValueError, match="SECRET_OF_TENANTS, which is empty"):
        _ = config.tenant_secret
