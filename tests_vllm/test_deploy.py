"""vLLM takes the options of the deployment example."""

from __future__ import annotations

from pathlib import Path

from vllm.config import KVTransferConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from blockattn_rag.server.config import CONNECTOR, ServingConfig

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_server_s_options_are_those_of_vllm() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    given = parser.parse_args(["--config", str(DEPLOY / "serve.yaml")])
    assert (given.model, given.served_model_name) == ("/model", ["llama"])
    held = given.structured_outputs_config
    assert held.backend == "guidance"
    assert held.disable_any_whitespace
    assert held.disable_additional_properties
    transfer = given.kv_transfer_config
    assert isinstance(transfer, KVTransferConfig)
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == (CONNECTOR, "fail")
    assert ServingConfig.parse(transfer.kv_connector_extra_config).cache is not None
