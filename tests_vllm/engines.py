"""A vLLM engine in separate processes that generates greedy answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from blockattn_rag.prompts.blocks import STORED, Keep
from blockattn_rag.server.plan import BlockPlan
from tests_vllm.reference import MODEL, TOKENS, Case


class Said(NamedTuple):
    """Answer: tokens, finish reason, and the report on its blocks, empty if there is none."""

    tokens: list[int]
    reason: str | None
    blocks: dict[str, Any]


class Engine:
    """vLLM with the bundled model in float32 and the connector of this package.

    Args:
        options: Options of the connector.
        module: Module of the connector class.
        model: Folder of the model.
        engine: Arguments that override those of ``LLM``.
    """

    def __init__(
        self,
        options: dict[str, Any],
        module: str = "blockattn_rag.server.vllm.connector",
        name: str = "BlockAttentionConnector",
        model: str = MODEL,
        **engine: Any,
    ) -> None:
        transfer = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config=options,
        )
        given = {"max_model_len": 2048, "max_num_seqs": 16, "disable_log_stats": False}
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            kv_transfer_config=transfer,
            **(given | engine),
        )

    def ask(
        self, ids: Sequence[int], params: dict[str, Any] | None = None, **sampling: Any
    ) -> Said:
        """Answer one prompt."""
        (said,) = self.ask_all([(list(ids), params)], **sampling)
        return said

    def ask_all(
        self, prompts: Sequence[tuple[list[int], dict[str, Any] | None]], **sampling: Any
    ) -> list[Said]:
        """Answer many prompts, which the engine batches."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in prompts],
            [sampling_of(params, **sampling) for _, params in prompts],
            use_tqdm=False,
        )
        return [
            Said(
                list(output.outputs[0].token_ids),
                output.outputs[0].finish_reason,
                (output.kv_transfer_params or {}).get("blockattn") or {},
            )
            for output in outputs
        ]

    def block(self, case: Case, keep: Keep = STORED, **sampling: Any) -> Said:
        """Answer in block mode."""
        return self.ask(case.ids, case.params_of(keep), **sampling)

    def encode(self, blocks: Sequence[list[int]], keep: Keep = STORED) -> list[str | None]:
        """Encode blocks. Returns the finish reason of each request."""
        plans = [BlockPlan("encode", (len(block),), keep=(keep,)).to_dict() for block in blocks]
        said = self.ask_all([*zip(blocks, plans, strict=True)], max_tokens=1)
        return [one.reason for one in said]

    def full(self, case: Case, **sampling: Any) -> Said:
        """Answer in full mode."""
        return self.ask(case.ids, None, **sampling)

    def add(self, name: str, ids: Sequence[int], params: dict[str, Any] | None) -> None:
        """Start a request without waiting for it."""
        prompt = {"prompt_token_ids": list(ids)}
        self.llm.llm_engine.add_request(name, prompt, sampling_of(params))

    def first_to_end(self) -> str:
        """Return the name of the added request that ends first."""
        while True:
            ended = [one.request_id for one in self.llm.llm_engine.step() if one.finished]
            if ended:
                return ended[0]

    def leave(self, name: str) -> None:
        """Abort a request."""
        self.llm.llm_engine.abort_request([name])

    def counted(self, name: str) -> float:
        """Return the value of a Prometheus counter of the engine."""
        return sum(
            float(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == name and hasattr(metric, "value")
        )

    def close(self) -> None:
        """Terminate the processes of the engine."""
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def running(options: dict[str, Any], **engine: Any) -> Iterator[Engine]:
    """Run an engine with one rank or, on its own core each, two ranks."""
    with pytest.MonkeyPatch.context() as environment:
        if 2 in (engine.get("tensor_parallel_size"), engine.get("pipeline_parallel_size")):
            environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        made = Engine(options, **engine)
        yield made
        made.close()


def sampling_of(params: dict[str, Any] | None, **sampling: Any) -> SamplingParams:
    """Return sampling parameters for 24 greedy tokens, as in ``Reference.answer``."""
    extra = None if params is None else {"kv_transfer_params": params}
    given = {"temperature": 0.0, "max_tokens": TOKENS} | sampling
    return SamplingParams(**({"min_tokens": given["max_tokens"]} | given), extra_args=extra)
