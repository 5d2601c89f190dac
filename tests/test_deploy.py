"""The deployment examples fit together, and give this package options that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from blockattn_rag.server.config import CONNECTOR, ServingConfig
from tests.test_documentation import accept

DEPLOY = Path(__file__).parents[1] / "deploy"
SERVE = yaml.safe_load((DEPLOY / "serve.yaml").read_text("utf-8"))
SECRETS = {
    line.partition("=")[0]
    for line in (DEPLOY / "secrets.env.example").read_text("utf-8").splitlines()
    if not line.startswith("#")
}
COMPOSE = (DEPLOY / "compose.yaml").read_text("utf-8")
OBJECTS = [
    one
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for one in yaml.safe_load_all(file.read_text("utf-8"))
]
PODS = [one["spec"]["template"]["spec"] for one in OBJECTS if "template" in one.get("spec", {})]
CONTAINERS = [one for pod in PODS for one in [*pod.get("initContainers", []), *pod["containers"]]]


def options() -> ServingConfig:
    return ServingConfig.parse(SERVE["kv-transfer-config"]["kv_connector_extra_config"])


def walk(value: Any) -> Iterator[Any]:
    """A value and all that it holds."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from walk(one)


def mounted(service: dict[str, Any]) -> set[str]:
    """Where a service of compose finds its volumes."""
    return {re.sub(r"\$\{[^}]*\}", "", one).split(":")[1] for one in service["volumes"]}


def test_the_server_is_given_this_connector_and_options_that_it_has() -> None:
    assert SERVE["kv-transfer-config"]["kv_connector"] == CONNECTOR
    assert options().store.startswith("s3://")
    assert options().cache is not None


def test_ray_starts_the_same_engine() -> None:
    (app,) = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text("utf-8"))["applications"]
    (model,) = app["args"]["llm_configs"]
    engine = model["engine_kwargs"]
    assert engine["kv_transfer_config"] == SERVE["kv-transfer-config"]
    assert engine["dtype"] == SERVE["dtype"]
    assert model["model_loading_config"]["model_id"] == SERVE["served-model-name"]
    assert model["runtime_env"]["env_vars"] == {"VLLM_PLUGINS": "blockattn"}


def test_a_server_of_compose_finds_what_its_options_name() -> None:
    services = yaml.safe_load(COMPOSE)["services"]
    server = services["vllm"]
    paths = {SERVE["model"], str(Path(options().profile).parent), "/config/serve.yaml"}
    assert mounted(server) == paths
    assert urlsplit(options().cache or "").hostname in services
    assert urlsplit(server["environment"]["AWS_ENDPOINT_URL"]).hostname in services
    bucket = urlsplit(options().store).hostname
    assert services["bucket"]["command"][0].endswith(f"mc mb --ignore-existing home/{bucket}")
    names = set(re.findall(r"(?<!\$)\$\{(\w+)", COMPOSE))
    assert names == {*SECRETS, "MODEL"}


def test_a_pod_of_kubernetes_finds_what_its_options_name() -> None:
    services = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "Service"}
    text = "".join(file.read_text("utf-8") for file in (DEPLOY / "kubernetes").glob("*.yaml"))
    addresses = [urlsplit(one) for one in [*re.findall(r"http://[\w.:]+", text), options().cache]]
    for address in addresses:
        assert address.port in {one["port"] for one in services[str(address.hostname)]["ports"]}
    labels = [
        one["spec"]["template"]["metadata"]["labels"] for one in OBJECTS if "selector" in
        one.get("spec", {}) and "template" in one["spec"]
    ]  # fmt: skip
    assert all(one["selector"] in labels for one in services.values())
    bucket = urlsplit(options().store).hostname
    assert f"mc mb --ignore-existing home/{bucket}\n" in text


def test_pods_mount_what_they_have_and_know_secrets_that_there_are() -> None:
    for pod in PODS:
        containers = [*pod.get("initContainers", []), *pod["containers"]]
        used = {one["name"] for each in containers for one in each.get("volumeMounts", [])}
        given = {one["name"] for one in pod.get("volumes", [])}
        assert used - {"data"} == given  # a StatefulSet claims that one
    asked = [one["secretKeyRef"] for one in walk(OBJECTS) if _has(one, "secretKeyRef")]
    assert {one["key"] for one in asked} == SECRETS
    (made,) = [one for one in OBJECTS if one["kind"] == "Kustomization"]
    assert {one["name"] for one in asked} == {one["name"] for one in made["secretGenerator"]}
    maps = {one["configMap"]["name"] for one in walk(OBJECTS) if _has(one, "configMap")}
    assert maps == {one["name"] for one in made["configMapGenerator"]}
    files = {file.name for file in (DEPLOY / "kubernetes").iterdir()} - {"kustomization.yaml"}
    assert {*made["resources"]} == files


def test_the_commands_have_the_options_that_they_are_given() -> None:
    services = yaml.safe_load(COMPOSE)["services"]
    shell = " ".join(services["profile"]["command"]).partition("blockattn-rag ")[2].split()
    commands = [shell, services["check"]["entrypoint"][1:]]
    for one in CONTAINERS:
        if one.get("command", [""])[0] == "blockattn-rag":
            commands.append([*one["command"][1:], *one.get("args", [])])
    assert len(commands) == 4
    for words in commands:
        accept(words)


def test_the_profile_is_of_the_number_type_that_is_served() -> None:
    (init,) = [one for one in CONTAINERS if one["name"] == "profile"]
    for text in (" ".join(init["command"]), COMPOSE):
        assert f"check /model --dtype {SERVE['dtype']}" in text.replace(", ", " ")


@pytest.mark.parametrize("name", ["VLLM_PORT", "VLLM_HOST_IP"])
def test_no_service_is_named_so_that_kubernetes_sets_a_variable_of_vllm(name: str) -> None:
    services = [one["metadata"]["name"] for one in OBJECTS if one["kind"] == "Service"]
    assert not [one for one in services if name.startswith(f"{one.upper()}_")]
    assert all(pod["enableServiceLinks"] is False for pod in PODS)


def _has(value: Any, name: str) -> bool:
    return isinstance(value, dict) and name in value
