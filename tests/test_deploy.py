"""The deployment examples are consistent, and only use existing options and commands."""

from __future__ import annotations

from pathlib import Path

import yaml

from blockattn_rag.server.config import CONNECTOR, ServingConfig
from blockattn_rag.server.launch import check_options
from tests.test_documentation import accept

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_deployment_examples_start_the_same_server() -> None:
    serve = yaml.safe_load((DEPLOY / "serve.yaml").read_text("utf-8"))
    transfer = serve["kv-transfer-config"]
    assert transfer["kv_connector"] == CONNECTOR
    options = ServingConfig.parse(transfer["kv_connector_extra_config"])

    (app,) = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text("utf-8"))["applications"]
    assert app["args"]["llm_configs"][0]["engine_kwargs"]["kv_transfer_config"] == transfer

    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes/llm.yaml").read_text("utf-8")))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    assert words == services["vllm"]["command"]
    assert {f"--store={options.store}", f"--dtype={serve['dtype']}"} < {*words}
    accept(["serve", *words])
    own, given = words[: words.index("--")], words[words.index("--") + 1 :]
    assert own[0] == serve["model"]
    check_options(given)
    extra = "--kv-transfer-config.kv_connector_extra_config"
    assert {f"{extra}.memory={options.memory}", f"{extra}.cache={options.cache}"} < {*given}

    state = services["vllm"]["environment"]["BLOCKATTN_RAG_HOME"]
    assert f"state:{state}" in services["vllm"]["volumes"]
    assert {"name": "BLOCKATTN_RAG_HOME", "value": state} in container["env"]
    assert {"name": "state", "mountPath": state} in container["volumeMounts"]
