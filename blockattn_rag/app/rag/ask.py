"""``ask``: a question to a database, through a LlamaIndex query engine."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import blockattn_rag.llama_index as adapter
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.documents import SOURCE_KEY
from blockattn_rag.app.rag.history import Turn, with_history
from blockattn_rag.app.rag.passages import distinct_retriever
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.errors import StoreError
from blockattn_rag.output.answers import complete_json
from blockattn_rag.prompts.markers import wrap

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore, QueryBundle

TOP_K = 5
"""Passages of a prompt by default."""

logger = logging.getLogger("blockattn_rag.app.rag")


@dataclass(frozen=True, slots=True)
class Source:
    """A passage that an answer was given from; ``page``: its page in a PDF, or empty."""

    source: str
    page: str
    title: str
    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its sources and what it reused.

    ``stats`` are of all calls of the language model together: ``ttft_s`` runs to the first token of
    the last call, because the answer is that call's. ``finish_reason`` is ``"length"`` where the
    answer was cut off by ``max_new_tokens`` or by the end of the context window, and
    ``"repetition"`` where it was ended because it repeated itself. ``waited_s`` is what a user
    waits: from the question to the first text, retrieval included; ``answered_s``: to the end of
    the answer. ``object`` is the JSON value that the answer is, where a schema asked for one.
    """

    question: str
    answer: str
    sources: tuple[Source, ...]
    stats: ReuseStats
    finish_reason: str
    waited_s: float
    object: Any = None
    answered_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, the figures beside the other fields; times in seconds."""
        return {
            "question": self.question,
            "answer": self.answer,
            "object": self.object,
            "mode": self.stats.mode,
            "recipe": self.stats.recipe,
            "sources": [asdict(source) for source in self.sources],
            **self.stats.reuse(),
            "int8_blocks": self.stats.int8_blocks,
            "generated_tokens": self.stats.generated_tokens,
            "finish_reason": self.finish_reason,
            "waited_s": self.waited_s,
            "answered_s": self.answered_s,
            "ttft_s": self.stats.ttft_s,
            "total_s": self.stats.total_s,
        }


class Assistant:
    """Answers questions from a database by a LlamaIndex query engine.

    Args:
        database: an open database.
        top_k: passages to retrieve, of different texts.
        max_new_tokens: longest answer.
        chat_template_kwargs: variables of the model's chat template, such as ``enable_thinking``.
        schema: a JSON schema that every answer is held to; it stands with the question.
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
        self._retriever = distinct_retriever(database, top_k)

    def ask(
        self,
        question: str,
        *,
        mode: Mode = "block",
        on_text: Callable[[str], None] | None = None,
        history: Sequence[Turn] = (),
    ) -> Answer:
        """Answer a question.

        Args:
            question: what is asked.
            mode: block mode reuses passages, full mode computes everything.
            on_text: gets the answer piece by piece; one that follows a schema when it is whole.
            history: the turns before it, oldest first. Passages are looked for by the question and
                the one before it.

        Raises:
            IncompleteAnswerError: an answer that was to follow a schema was cut.
            GrammarError: the schema cannot be compiled.
            ValueError: the question holds bytes that are no text.
        """
        from llama_index.core.query_engine import RetrieverQueryEngine

        _check_text(question)
        started = time.perf_counter()
        llm = self._llm(mode)
        if mode == "block" and not self._head_was_stored:
            self._store_head(llm)
        engine = RetrieverQueryEngine(
            self._retriever,
            adapter.block_response_synthesizer(llm, streaming=True),
            node_postprocessors=[adapter.BlockKVPrefetch(llm), adapter.BlockKVPostprocessor()],
        )
        pieces: list[str] = []
        waited_s = None
        with _finished_calls() as calls:
            response: Any = engine.query(self._query(question, history, llm))
            with contextlib.closing(response.response_gen) as coming:
                for piece in filter(None, coming):
                    waited_s = waited_s or time.perf_counter() - started
                    pieces.append(piece)
                    if on_text and self._schema is None:
                        on_text(piece)
        answered_s = time.perf_counter() - started
        text = "".join(pieces).strip()
        finish_reason = calls[-1]["finish_reason"] if calls else "stop"
        found = None
        if self._schema is not None:
            found = complete_json(text, finish_reason)
            if on_text:
                on_text(text)
        stats = _total(mode, calls)
        logger.info(
            "%s mode, %d passages: fetched in %.3f s, placed in %.3f s, prefilled in %.3f s; "
            "%.3f s to the first text, retrieval included",
            mode, len(response.source_nodes), stats.fetch_s, stats.assemble_s, stats.prefill_s,
            waited_s or answered_s,
        )  # fmt: skip
        return Answer(
            question=question,
            answer=text,
            sources=tuple(_source(node) for node in response.source_nodes),
            stats=stats,
            finish_reason=finish_reason,
            waited_s=waited_s or answered_s,
            object=found,
            answered_s=answered_s,
        )

    def warm_up(self) -> None:
        """Run retrieval and the model once in both modes, so that the next answer is timed without
        the first call's extra time. No passage is looked up or stored."""
        from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

        self._retriever.retrieve("warm-up")
        llm = self._llm("block")
        self._store_head(llm)
        whole = llm.filled(
            DEFAULT_TEXT_QA_PROMPT_SEL, context_str=wrap("passage"), query_str="warm-up"
        )
        head = tuple(block for block in whole.context if not block.is_passage)
        prompt = replace(whole, context=head)
        for mode in get_args(Mode):
            self._database.engine.generate(prompt, mode=mode, max_new_tokens=2)

    def _llm(self, mode: Mode) -> adapter.BlockAttentionLLM:
        return adapter.BlockAttentionLLM(
            engine=self._database.engine,
            block_template=self._database.template,
            mode=mode,
            max_new_tokens=self._max_new_tokens,
            generate_kwargs=self._options,
        )

    def _query(
        self, question: str, history: Sequence[Turn], llm: adapter.BlockAttentionLLM
    ) -> QueryBundle:
        """What the model is asked, and what passages are looked for by."""
        from llama_index.core import QueryBundle
        from llama_index.core.output_parsers.pydantic import PYDANTIC_FORMAT_TMPL

        query = with_history(
            question,
            history,
            count=lambda text: len(llm.tokenize(text)),
            max_tokens=llm.metadata.context_window // 4,
        )
        if self._schema is not None:
            schema = json.dumps(self._schema, ensure_ascii=False)
            query = f"{query}\n\n{PYDANTIC_FORMAT_TMPL.format(schema=schema).strip()}"
        looked_for = [question, *(turn.question for turn in history[-1:])]
        return QueryBundle(query, custom_embedding_strs=looked_for)

    def _store_head(self, llm: adapter.BlockAttentionLLM) -> None:
        """Store the prompt's head, once: `store gc` may have deleted it, as no passage refers to
        it. That it cannot be stored is no reason not to answer."""
        self._head_was_stored = True  # or was tried: a store that hangs is not waited for again
        try:
            adapter.encode_prompt_head(llm)
        except StoreError as error:
            logger.warning("%s. The answer is not affected.", error)


def _check_text(question: str) -> None:
    try:
        question.encode()
    except UnicodeEncodeError as error:  # bytes of a pipe or an argument come as half surrogates
        raise ValueError(
            f"expected a question in UTF-8, found bytes that are none after {error.start} "
            f"characters of {question[:80]!a}; convert the input, or set the terminal's encoding"
        ) from error


def _total(mode: Mode, calls: Sequence[Any]) -> ReuseStats:
    """The figures of all calls of the language model; the first token is the last call's."""
    used = [ReuseStats.from_dict(call["usage"]) for call in calls]
    total = sum(used, ReuseStats(mode))
    *_, last = used or [total]
    ttft_s = total.total_s - last.total_s + last.ttft_s
    return replace(total, ttft_s=ttft_s, recipe=last.recipe)


def _source(found: NodeWithScore) -> Source:
    node = found.node
    return Source(
        source=str(node.metadata.get(SOURCE_KEY, "")),
        page=str(node.metadata.get("page_label", "")),
        title=str(node.metadata.get("title", "")),
        text=node.get_content(),
        score=found.score,
    )


@contextlib.contextmanager
def _finished_calls() -> Iterator[list[Any]]:
    """Collects what the language model reports of each call: ``usage`` and ``finish_reason``."""
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
