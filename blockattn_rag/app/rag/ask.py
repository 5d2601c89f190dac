"""Answers questions from a database, with a LlamaIndex query engine or a server."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

import blockattn_rag.llama_index as adapter
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.documents import SOURCE_KEY
from blockattn_rag.app.rag.passages import distinct_retriever, prompt_maker
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.errors import StoreError
from blockattn_rag.output.answers import complete_json
from blockattn_rag.prompts.formats import Passage

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore, QueryBundle

TOP_K = 5
"""Default number of passages in a prompt."""

logger = logging.getLogger("blockattn_rag.app.rag")


class Turn(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Source:
    """Passage that an answer is based on. ``page``: Page in a PDF, or empty."""

    source: str
    page: str
    title: str
    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class AssistantAnswer:
    """Answer with its sources and reuse statistics.

    Args:
        stats: Totals over all model calls. ``ttft_s`` runs until the first token of the last call,
            which generates the answer.
        waited_s: Seconds from the question to the first text, including retrieval.
        object: The answer as a JSON value. None without a schema.
        answered_s: Seconds from the question to the end of the answer.
        includes_warm_up: Whether the times include one-time costs, because this is the assistant's
            first call in this mode and ``warm_up`` was not called.
    """

    question: str
    answer: str
    sources: tuple[Source, ...]
    stats: ReuseStats
    finish_reason: str
    waited_s: float
    object: Any = None
    answered_s: float = 0.0
    includes_warm_up: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and statistics, except the durations of individual steps."""
        fields = asdict(self)
        stats: dict[str, Any] = fields.pop("stats")
        for step in ("fetch_s", "assemble_s", "prefill_s"):
            del stats[step]
        return fields | stats


_Outcome: TypeAlias = "tuple[Sequence[NodeWithScore], str, ReuseStats]"
"""Sources, finish reason and statistics of an answer."""


class Assistant:
    """RAG assistant that answers questions from a database.

    Args:
        top_k: Number of passages to retrieve.
        max_new_tokens: Maximum length of an answer in tokens.
        chat_template_kwargs: Variables of the model's chat template, such as ``enable_thinking``.
        schema: JSON schema that answers must match. It is included in the prompt.
    """

    def __init__(
        self,
        database: Database,
        *,
        top_k: int = TOP_K,
        max_new_tokens: int = 256,
        chat_template_kwargs: dict[str, Any] | None = None,
        schema: dict[str, Any] | None = None,
    ) -> None:
        self._database = database
        self._max_new_tokens = max_new_tokens
        self._options: dict[str, Any] = {"chat_template_kwargs": chat_template_kwargs or {}}
        self._schema = schema
        if schema is not None:
            self._options["structured_outputs"] = {"json": schema}
        self._head_was_stored = False
        self._warm: set[Mode] = set()
        self._retriever = distinct_retriever(database, top_k)

    def ask(
        self,
        question: str,
        *,
        mode: Mode = "block",
        on_text: Callable[[str], None] | None = None,
        history: Sequence[Turn] = (),
    ) -> AssistantAnswer:
        """Answer a question.

        Args:
            on_text: Called with each piece of the answer. With a schema, called once with the
                complete answer.
            history: Earlier turns, oldest first. Passages are retrieved for this question and the
                previous one.
        """
        try:
            question.encode()
        except UnicodeEncodeError as error:  # Python decodes invalid bytes as lone surrogates.
            raise ValueError(
                f"Invalid UTF-8 after {error.start} characters of the question {question[:80]!a}; "
                "convert the input, or set the terminal's encoding"
            ) from error
        started = time.perf_counter()
        pieces: list[str] = []
        waited_s = 0.0

        def take(piece: str) -> None:
            nonlocal waited_s
            waited_s = waited_s or time.perf_counter() - started
            pieces.append(piece)
            if on_text and self._schema is None:
                on_text(piece)

        answer = self._served if self._database.server is not None else self._local
        nodes, finish_reason, stats = answer(self._query(question, history), mode, take)
        answered_s = time.perf_counter() - started
        waited_s = waited_s or answered_s
        text = "".join(pieces).strip()
        value = None
        if self._schema is not None:
            value = complete_json(text, finish_reason)
            if on_text:
                on_text(text)
        includes_warm_up = mode not in self._warm
        self._warm.add(mode)
        logger.info(
            "%s mode, %d passages: fetched in %.3f s, placed in %.3f s, prefilled in %.3f s; "
            "%.3f s to the first text, including retrieval",
            mode, len(nodes), stats.fetch_s, stats.assemble_s, stats.prefill_s, waited_s,
        )  # fmt: skip
        return AssistantAnswer(
            question=question,
            answer=text,
            sources=tuple(
                Source(
                    source=str(hit.node.metadata.get(SOURCE_KEY, "")),
                    page=str(hit.node.metadata.get("page_label", "")),
                    title=str(hit.node.metadata.get("title", "")),
                    text=hit.node.get_content(),
                    score=hit.score,
                )
                for hit in nodes
            ),
            stats=stats,
            finish_reason=finish_reason,
            waited_s=waited_s,
            object=value,
            answered_s=answered_s,
            includes_warm_up=includes_warm_up,
        )

    def _local(self, query: QueryBundle, mode: Mode, take: Callable[[str], None]) -> _Outcome:
        """Answer with the engine in this process."""
        from llama_index.core.query_engine import RetrieverQueryEngine

        llm = self._llm(mode)
        if mode == "block" and not self._head_was_stored:
            self._store_head(llm)
        engine = RetrieverQueryEngine(
            self._retriever,
            adapter.block_response_synthesizer(llm, streaming=True),
            node_postprocessors=[adapter.BlockKVPostprocessor()],
        )
        with _finished_calls() as calls:
            response: Any = engine.query(query)
            with contextlib.closing(response.response_gen) as coming:
                for piece in filter(None, coming):
                    take(piece)
        finish_reason = calls[-1]["finish_reason"] if calls else "stop"
        return response.source_nodes, finish_reason, _total(mode, calls)

    def _served(self, query: QueryBundle, mode: Mode, take: Callable[[str], None]) -> _Outcome:
        """Answer with the server, which creates the same prompt from the passages."""
        assert self._database.server is not None
        nodes = self._retriever.retrieve(query)
        finish_reason, stats = self._database.server.ask(
            query.query_str,
            [text for node in nodes if (text := adapter.canonical_text(node.node))],
            mode=mode,
            take=take,
            max_tokens=self._max_new_tokens,
            chat_template_kwargs=self._options["chat_template_kwargs"],
            schema=self._schema,
        )
        return nodes, finish_reason, stats

    def warm_up(self) -> None:
        """Run retrieval and the model in both modes, so that later times are comparable.

        Does not read or store keys and values of passages.
        """
        self._retriever.retrieve("warm-up")
        if (server := self._database.server) is not None:
            for mode in get_args(Mode):
                server.ask("warm-up", [], mode=mode, max_tokens=2)
                self._warm.add(mode)
            return
        self._store_head(self._llm("block"))
        prompt = prompt_maker(self._database)("warm-up", [Passage("", "passage")])
        head = tuple(block for block in prompt.context if not block.is_passage)
        for mode in get_args(Mode):
            self._database.engine.generate(
                replace(prompt, context=head), mode=mode, max_new_tokens=2
            )
            self._warm.add(mode)

    def _llm(self, mode: Mode) -> adapter.BlockAttentionLLM:
        return adapter.BlockAttentionLLM(
            engine=self._database.engine,
            block_template=self._database.template,
            mode=mode,
            max_new_tokens=self._max_new_tokens,
            generate_kwargs=self._options,
        )

    def _query(self, question: str, history: Sequence[Turn]) -> QueryBundle:
        from llama_index.core import QueryBundle
        from llama_index.core.output_parsers.pydantic import PYDANTIC_FORMAT_TMPL

        query = with_history(
            question,
            history,
            count=lambda text: len(self._database.tokenizer.text_ids(text)),
            max_tokens=self._database.max_context_tokens // 4,
        )
        if self._schema is not None:
            schema = json.dumps(self._schema, ensure_ascii=False)
            query = f"{query}\n\n{PYDANTIC_FORMAT_TMPL.format(schema=schema).strip()}"
        retrieve_for = [question, *(turn.question for turn in history[-1:])]
        return QueryBundle(query, custom_embedding_strs=retrieve_for)

    def _store_head(self, llm: adapter.BlockAttentionLLM) -> None:
        """Store the instructions before the passages again if ``store gc`` has deleted them. If the
        store fails, the question is still answered, but storing is not retried."""
        self._head_was_stored = True
        try:
            adapter.encode_prompt_head(llm)
        except StoreError as error:
            logger.warning("%s. The answer is not affected.", error)


def with_history(
    question: str, turns: Sequence[Turn], *, count: Callable[[str], int], max_tokens: int
) -> str:
    """Prepend earlier turns to a question, except the oldest ones that exceed ``max_tokens``.

    In the prompt, the turns come after the passages, so the passages remain reusable blocks.
    """
    kept: list[str] = []
    left = max_tokens
    for turn in reversed(turns):
        text = f"Q: {turn.question}\nA: {turn.answer}"
        if (left := left - count(text)) < 0:
            break
        kept.insert(0, text)
    if not kept:
        return question
    return "Earlier questions and answers:\n" + "\n".join(kept) + f"\n\nThis question: {question}"


def _total(mode: Mode, calls: Sequence[Any]) -> ReuseStats:
    used = [ReuseStats.from_dict(call["usage"]) for call in calls] or [ReuseStats(mode)]
    total, last = sum(used, ReuseStats(mode)), used[-1]
    ttft_s = total.total_s - last.total_s + last.ttft_s
    return replace(total, ttft_s=ttft_s, recipe=last.recipe)


@contextlib.contextmanager
def _finished_calls() -> Iterator[list[Any]]:
    """Collect the raw response of each model call, with ``usage`` and ``finish_reason``."""
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.instrumentation.events import BaseEvent
    from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
    from llama_index_instrumentation import get_dispatcher

    calls: list[Any] = []

    class Collector(BaseEventHandler):
        @classmethod
        def class_name(cls) -> str:
            return "CallCollector"

        def handle(self, event: BaseEvent, **kwargs: Any) -> None:
            if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent) and event.response:
                calls.append(event.response.raw)

    root, collector = get_dispatcher(), Collector()
    root.add_event_handler(collector)
    try:
        yield calls
    finally:
        root.event_handlers.remove(collector)
