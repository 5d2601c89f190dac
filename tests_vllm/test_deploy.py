"""vLLM accepts the options of the deployment examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from vllm.config import KVTransferConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

from blockattn_rag.server.config import CONNECTOR, ServingConfig
from blockattn_rag.server.launch import STRUCTURED_OUTPUTS, vllm_command

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ModuleNotFoundError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

DEPLOY = Path(__file__).parents[1] / "deploy"


def parsed(*options: str) -> Any:
    return make_arg_parser(FlexibleArgumentParser()).parse_args([*options])


def test_server_options_are_accepted_by_vllm() -> None:
    given = parsed("--config", str(DEPLOY / "serve.yaml"))
    assert (given.model, given.served_model_name) == ("/model", ["llama"])
    assert given.allowed_origins == []
    outputs = given.structured_outputs_config
    found = {name: getattr(outputs, name) for name in STRUCTURED_OUTPUTS}
    assert found == STRUCTURED_OUTPUTS
    transfer = given.kv_transfer_config
    assert isinstance(transfer, KVTransferConfig)
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == (CONNECTOR, "fail")
    assert ServingConfig.parse(transfer.kv_connector_extra_config).cache is not None


def test_container_options_are_added_to_those_of_serve() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    words = services["vllm"]["command"]
    options = words[words.index("--") + 1 :]
    address: dict[str, Any] = {"host": "0.0.0.0", "port": 8000}
    connector = {"store": "s3://kv/llama"}
    command = vllm_command(
        "/model", name="/model", dtype="bfloat16", connector=connector, options=options, **address
    )
    given = parsed(*command[command.index("--model") :])
    assert given.served_model_name == ["llama"]
    assert given.structured_outputs_config.backend == "guidance"
    transfer = given.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == (CONNECTOR, "kv_both")
    found = ServingConfig.parse(transfer.kv_connector_extra_config)
    assert (found.store, found.memory) == ("s3://kv/llama", "16GiB")
    assert found.cache == "redis://valkey:6379/0"
