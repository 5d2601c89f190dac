"""The deployment examples fit together, and use options and commands that exist."""

from __future__ import annotations

from pathlib import Path

import yaml

from blockattn_rag.server.config import CONNECTOR, ServingConfig
from tests.test_documentation import accept

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_deployment_examples_start_the_same_server() -> None:
    serve = yaml.safe_load((DEPLOY / "serve.yaml").read_text("utf-8"))
    transfer = serve["kv-transfer-config"]
    assert transfer["kv_connector"] == CONNECTOR
    assert ServingConfig.parse(transfer["kv_connector_extra_config"]).store.startswith("s3://")

    (app,) = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text("utf-8"))["applications"]
    assert app["args"]["llm_configs"][0]["engine_kwargs"]["kv_transfer_config"] == transfer

    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    profile = " ".join(services["profile"]["command"]).partition("blockattn-rag ")[2].split()
    commands = [profile, services["check"]["entrypoint"][1:]]
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for item in yaml.safe_load_all(file.read_text("utf-8")):
            pod = item.get("spec", {}).get("template", {}).get("spec", {})
            for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
                if container.get("command", [""])[0] == "blockattn-rag":
                    commands.append([*container["command"][1:], *container.get("args", [])])
    assert len(commands) == 4
    for words in commands:
        accept(words)
