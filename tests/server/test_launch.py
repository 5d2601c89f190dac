"""vLLM as a child process: command, start and termination."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blockattn_rag.errors import ServingError
from blockattn_rag.server import launch
from blockattn_rag.server.launch import (
    VllmServer,
    check_options,
    prevents_recomputing,
    require_port,
    vllm_command,
    vllm_environment,
)
from tests.server.fake_vllm import COMMAND, FakeVllm, fake_vllm

Start = Callable[..., VllmServer]


@pytest.fixture
def vllm(tmp_path: Path) -> FakeVllm:
    return fake_vllm(tmp_path)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def start(vllm: FakeVllm, port: int, log: list[str]) -> Start:
    def started(*more: str) -> VllmServer:
        command = [*COMMAND, "--host", "127.0.0.1", "--port", str(port), *more]
        return VllmServer(command, vllm.environment, log.append)

    return started


def test_the_command_has_the_connector_and_ends_with_vllm_options() -> None:
    command = vllm_command(
        "/models/llama",
        name="llama",
        dtype="bfloat16",
        connector={"store": "2026", "profile": "p.json"},
        host="::",
        port=9000,
        revision="c" * 40,
        options=["--served-model-name", "other"],
    )
    pairs = dict(itertools.pairwise(command))
    assert pairs["--model"] == "/models/llama"
    assert (pairs["--dtype"], pairs["--revision"]) == ("bfloat16", "c" * 40)
    assert (pairs["--host"], pairs["--port"]) == ("::", "9000")
    assert pairs["--kv-transfer-config.kv_connector"] == '"BlockAttentionConnector"'
    assert pairs["--kv-transfer-config.kv_role"] == '"kv_both"'
    # Store names are strings, even if they look like numbers.
    assert pairs["--kv-transfer-config.kv_connector_extra_config.store"] == '"2026"'
    assert json.loads(pairs["--structured-outputs-config"])["backend"] == "guidance"
    assert command[-2:] == ["--served-model-name", "other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "9"], "^Cannot pass --port to vLLM: pass --port before --"),
        (["--por=9"], "^Cannot pass --por, short for --port, to vLLM: pass --port before --"),
        (["--kv-transfer-config", "{}"], "set individual options of the connector"),
        (["--ssl-keyf", "k.pem"], "put a TLS proxy in front of the server"),
    ],
)
def test_vllm_options_that_this_command_sets_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(["--max-model-len", "64", *options])


CONNECTOR = "--kv-transfer-config.kv_connector_extra_config"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--api-key hunter2", "^Cannot pass --api-key to vLLM: set .* VLLM_API_KEY$"),
        ("--api_key=hunter2", "^Cannot pass --api-key to vLLM: .*VLLM_API_KEY$"),
        (
            "--api-ke hunter2",
            "^Cannot pass --api-ke, short for --api-key, to vLLM: .*VLLM_API_KEY$",
        ),
        ("--api_k=hunter2", "^Cannot pass --api-k, short for --api-key, to vLLM: .*VLLM_API_KEY$"),
        ("--hf-token hunter2", "^Cannot pass --hf-token to vLLM: .* HF_TOKEN$"),
        ("--hf_t=hunter2", "^Cannot pass --hf-t, short for --hf-token, to vLLM: .* HF_TOKEN$"),
        ("--ssl-keyfile-password hunter2", "^Cannot pass --ssl-keyfile-password to vLLM: .*proxy"),
        (
            "--some-api-key hunter2",
            "^Do not pass --some-api-key as a vLLM option.*in the environment",
        ),
        (f"{CONNECTOR}.password=hunter2", "password as a vLLM option.*in the environment"),
        ('--model-loader-extra-config {"s3_secret_access_key":"hunter2"}', "s3_secret_access_key"),
        (f"{CONNECTOR}.cache redis://:hunter2@valkey/0", "REDIS_PASSWORD"),
        (f"{CONNECTOR}.cache redis://valkey/0?password=hunter2", "REDIS_PASSWORD"),
        ("--otlp-traces-endpoint=http://me:hunter2@host/", "in --otlp-traces-endpoint after --"),
    ],
)
def test_secrets_in_vllm_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_options(["--max-model-len", "64", *option.split()])
    assert "hunter2" not in str(caught.value)


def test_options_without_secrets_are_accepted() -> None:
    check_options(
        [
            *("--max-num-batched-tokens=64", "--tokenizer", "llama", "--api-server-count", "2"),
            *("--allowed_origins", '["https://example.org"]', "--hf-overrides", '{"pad_token": 1}'),
            *(f"{CONNECTOR}.tenant_secret_env", "TENANT_SECRET", "-tp", "2", "--enforce-eager"),
            *(f"{CONNECTOR}.cache", "redis://valkey:6379/0", "--tokenizer-mode", "auto"),
        ]
    )


def origins_of(*options: str) -> list[str]:
    """Return the values of vLLM's option ``--allowed-origins`` in a command."""
    command = vllm_command(
        "m", name="m", dtype="float32", connector={}, host="::", port=1, options=options
    )
    return [value for name, value in itertools.pairwise(command) if name == "--allowed-origins"]


def test_no_origins_are_allowed_by_default(tmp_path: Path) -> None:
    assert [json.loads(one) for one in origins_of()] == [[]]
    assert origins_of("--max-model-len", "64", "--allowed-methods", "[]") == ["[]"]
    assert origins_of("--allowed-origins", '["https://example.org"]') == ['["https://example.org"]']
    assert origins_of('--allowed_origins=["https://example.org"]') == []
    assert origins_of("--allowed-or", "[1]") == ["[]"]  # the last one takes effect
    file = tmp_path / "serve.yaml"
    file.write_text("allowed_origins: '[\"https://example.org\"]'\n")
    assert origins_of("--config", str(file)) == []
    file.write_text("max-model-len: 64\n")
    assert origins_of("--config", str(file)) == ["[]"]


@pytest.mark.parametrize("line", ["api-key: hunter2", '"hf_token": hunter2', "api-k: hunter2"])
def test_a_secret_in_a_config_file_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"max-model-len: 64\n{line}\n")
    with pytest.raises(ValueError, match="set the environment variable") as caught:
        check_options(["--config", str(file)])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("given", ["--config={}", "--config {}"])
def test_a_connector_in_a_config_file_is_refused(given: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    options = given.format(file).split()
    file.write_text("tensor-parallel-size: 2\n")
    check_options(options)
    file.write_text("tensor-parallel-size: 2\nkv_transfer_config:\n  kv_role: kv_both\n")
    with pytest.raises(ValueError, match="remove it; set individual options"):
        check_options(options)


@pytest.mark.parametrize("line", ["uds: /tmp/serve", "ssl-certfile: cert.pem"])
def test_a_config_file_cannot_move_the_server_to_another_address(line: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"host: other\nport: 1\n{line}\n")
    with pytest.raises(ValueError, match=f"Found {line.partition(':')[0]} in .*: remove it; "):
        check_options(["--config", str(file)])


def test_the_environment_adds_the_plugin_and_space_for_pages() -> None:
    made = vllm_environment({"PATH": "/bin", "VLLM_PLUGINS": "mine"})
    assert made["VLLM_PLUGINS"] == "mine,blockattn"
    assert 1 <= int(made["VLLM_CPU_KVCACHE_SPACE"]) <= 16
    assert made["PATH"] == "/bin"
    given = {"VLLM_PLUGINS": "blockattn", "VLLM_CPU_KVCACHE_SPACE": "3"}
    assert vllm_environment(given) == given


def test_a_port_in_use_is_refused(port: int) -> None:
    require_port("127.0.0.1", port)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ServingError, match=f"port {port}: .*in use; choose another"),
    ):
        require_port("127.0.0.1", port)


def test_stopping_the_server_ends_all_processes(
    start: Start, vllm: FakeVllm, port: int, log: list[str]
) -> None:
    with start() as server:
        server.wait_until_healthy("127.0.0.1", port, lambda _: None)
    vllm.assert_ended()
    assert [line.partition(",")[0] for line in log] == ["the log of the fake", "Stopping vLLM"]
    require_port("127.0.0.1", port)


def test_killing_the_parent_ends_all_processes(vllm: FakeVllm, port: int) -> None:
    code = (
        "import os, sys, time; from blockattn_rag.server import launch; launch.STOP_S = 1.0\n"
        "server = launch.VllmServer(sys.argv[1:], os.environ, print); time.sleep(300)"
    )
    command = [sys.executable, "-c", code, *COMMAND, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=vllm.environment) as parent:
        try:
            vllm.told()
        finally:
            parent.kill()
    vllm.assert_ended()


def broken(_line: str) -> None:
    raise BrokenPipeError


@pytest.mark.parametrize("write", [list[str]().append, broken])
def test_a_server_that_fails_to_start_is_reported(
    vllm: FakeVllm, port: int, write: Callable[[str], None]
) -> None:
    """Even if the log cannot be written."""
    command = [*COMMAND, "--host", "127.0.0.1", "--port", str(port), "--die", ""]
    message = "vLLM exited with status 3 before it was ready: ServingError: the cause$"
    with (
        VllmServer(command, vllm.environment, write) as server,
        pytest.raises(ServingError, match=message),
    ):
        server.wait_until_healthy("127.0.0.1", port, lambda _: None)
    vllm.assert_ended()


def test_a_server_that_never_answers_times_out(
    start: Start, vllm: FakeVllm, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_REPORT_S", 0.0)
    waited: list[float] = []
    with (
        start("--never-healthy", "") as server,
        pytest.raises(ServingError, match=f"was not ready after 1 s: .*:{port}/health did not"),
    ):
        server.wait_until_healthy("127.0.0.1", port, waited.append, limit_s=1)
    vllm.assert_ended()
    assert waited == sorted(waited)
    assert waited


def test_a_server_that_exits_later_is_reported(start: Start, vllm: FakeVllm, port: int) -> None:
    with start() as server:
        server.wait_until_healthy("127.0.0.1", port, lambda _: None)
        server._process.kill()
        with pytest.raises(ServingError, match="exited with status -9 while it was serving"):
            server.run()
    vllm.assert_ended()


def test_a_server_that_ignores_sigterm_is_killed(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_S", 0.5)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    with VllmServer([COMMAND[0], "-c", f"{code}time.sleep(300)"], {}, log.append) as server:
        while not log:
            pass
    assert server._process.returncode == -9
    assert log[-1].startswith("vLLM did not stop within")


def test_options_that_prevent_recomputation_are_reported(tmp_path: Path) -> None:
    assert prevents_recomputing(["--max-model-len", "64", "--enforce-eager"]) is None
    assert prevents_recomputing(["--enable_lora"]) == "--enable-lora"
    assert prevents_recomputing(["--pipeline-parallel-size=2"]) == "--pipeline-parallel-size"
    assert prevents_recomputing(["-pp", "2"]) == prevents_recomputing(["-pp=2"]) == "-pp"
    file = tmp_path / "vllm.yaml"
    file.write_text("kv_cache_dtype: fp8\n")
    assert prevents_recomputing(["--config", str(file)]) == "--kv-cache-dtype"
