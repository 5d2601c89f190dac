"""``blockattn-rag serve`` starts vLLM, checks its answers, and leaves no processes behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests_vllm.reference import Reference

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_model_is_served_by_one_command(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    serve = [sys.executable, "-m", "blockattn_rag", "serve", "bundled", "--port", str(port)]
    vllm = ["--enforce-eager", "--max-model-len", "2048"]
    vllm += ["--kv-transfer-config.kv_connector_extra_config.memory", "64MiB"]
    process = subprocess.Popen(
        [*serve, "--store", str(tmp_path / "kv"), "--", *vllm],
        env={**os.environ, "BLOCKATTN_RAG_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
    )
    try:
        assert process.stdout is not None
        address, curl = process.stdout.readline(), process.stdout.readline()
        assert address == f"bundled is served at http://127.0.0.1:{port}\n", log.read_text()
        words = shlex.split(curl)
        body, cached = json.loads(words[-1]), []
        with httpx.Client(trust_env=False, timeout=60) as client:
            for _ in range(2):
                answer = client.post(words[1], json=body).raise_for_status().json()
                assert "214" in answer["choices"][0]["message"]["content"]
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] < cached[1]
        base_url = words[1].removesuffix("/chat/completions")
        asking = [sys.executable, str(EXAMPLES / "ask_openai.py"), base_url]
        lines = subprocess.run(asking, capture_output=True, text=True, check=True).stdout
        said, first, again, second = lines.splitlines()
        assert said == again == "The height of Halden Tower is 214 metres."
        assert "'misses': 1" in first
        assert "'misses': 0" in second
        assert int(first.split()[0]) < int(second.split()[0])
        case = reference.case(11)
        with httpx.Client(trust_env=False, timeout=60) as client:
            body = {"model": "bundled", **case.body()}
            answer = client.post(f"{base_url}/completions", json=body).raise_for_status().json()
        assert answer["blockattn"]["mode"] == "block"
        assert answer["choices"][0]["token_ids"] == reference.answer(case)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) > 1
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
    finally:
        process.kill()
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # containers may not reap orphans
    assert [one for one in started if one.is_running() and one.status() not in ended] == []
    errors = log.read_text()
    assert "The server works correctly" in errors
    # During shutdown, vLLM's server may report the exit of its engine as an error.
    assert "Traceback" not in errors.partition("Stopping vLLM")[0]
