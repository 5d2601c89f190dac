"""Web page that answers a question in full mode and block mode, side by side.

Questions, passages and answers are untrusted, so this module escapes all displayed text. Only
``serve`` requires gradio.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from html import escape
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, NamedTuple

from blockattn_rag.app.demo.run import speedup
from blockattn_rag.app.rag.ask import Assistant, AssistantAnswer
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.passages import retriever
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.lazy import missing_extra
from blockattn_rag.prompts.blocks import Block

logger = logging.getLogger(__name__)

MISSING = missing_extra("gradio", "web")
MAX_NEW_TOKENS = 80
_TICK_S = 0.1
"""Seconds between clock updates in a column."""

_STYLE = """<style>
.ba-bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 8px 0 4px }
.ba-reused { background: #0ca678 } .ba-computed { background: #e8590c }
.ba-time { font-size: 2em; font-weight: 600; line-height: 1.3 } .ba-small { opacity: .75 }
.ba-answer { min-height: 5em; white-space: pre-wrap; overflow-wrap: anywhere; margin: 8px 0 }
.ba-tag { color: white !important; border-radius: 4px; padding: 1px 6px; font-size: .8em }
.ba-text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 10px 1em }
</style>"""


class Retrieved(NamedTuple):
    """Retrieved passage, and whether it was stored before the question."""

    text: str
    tokens: int
    stored: bool


class Columns(NamedTuple):
    """Parts of the page, as HTML."""

    full: str
    block: str
    passages: str


class Race:
    """Answers questions in both modes, sequentially, so that neither slows the other down."""

    def __init__(self, database: Database, top_k: int = 6) -> None:
        self._database, self._top_k = database, top_k
        self.assistant = Assistant(database, top_k=top_k, max_new_tokens=MAX_NEW_TOKENS)

    def run(self, question: str) -> Iterator[Columns]:
        """Answer a question. Yields the page whenever it changes."""
        question = question.strip()
        shown = Columns(_column("full"), _column("block"), "")
        if not question:
            yield shown._replace(passages="Type a question.")
            return
        try:
            retrieved = self.retrieved(question)
            shown = shown._replace(passages=_passages(retrieved))
            yield shown
            answers: dict[Mode, AssistantAnswer] = {}
            for mode in ("block", "full"):
                for text, clock_s, answer in self._stream(question, mode):
                    stats = answer.stats if answer else None
                    html = _column(mode, text, clock_s, stats)
                    shown = shown._replace(**{mode: html})
                    if answer:
                        answers[mode] = answer
                    yield shown
            ratio = answers["full"].stats.ttft_s / answers["block"].stats.ttft_s
            gain = f"<p><b>First token {speedup(ratio)} in block mode.</b></p>"
            yield shown._replace(passages=gain + shown.passages)
        except Exception as error:
            logger.exception("Cannot answer %r", question)
            yield shown._replace(passages=f"<b>Error:</b> {escape(str(error))}")

    def retrieved(self, question: str) -> list[Retrieved]:
        engine, template = self._database.engine, self._database.template
        retrieved = []
        for text in retriever(self._database)(question, self._top_k):
            block = Block(text, template)
            tokens = len(engine.model.tokenizer.block_ids(block, first=False))
            retrieved.append(Retrieved(text, tokens, engine.contains(block)))
        return retrieved

    def _stream(
        self, question: str, mode: Mode
    ) -> Iterator[tuple[str, float, AssistantAnswer | None]]:
        """Yield the text so far, the seconds until the first token (or until now), and the answer.

        The answer is None until it is complete.
        """
        pieces: SimpleQueue[str] = SimpleQueue()
        closed = Event()

        def on_text(piece: str) -> None:
            if closed.is_set():
                raise InterruptedError("The page was closed")
            pieces.put(piece)

        started, first_s, text = time.perf_counter(), None, ""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.assistant.ask, question, mode=mode, on_text=on_text)
            try:
                while not (coming.done() and pieces.empty()):
                    try:
                        text += pieces.get(timeout=_TICK_S)
                        first_s = first_s or time.perf_counter() - started
                    except Empty:
                        pass  # Only update the clock.
                    yield text, first_s or time.perf_counter() - started, None
                answer = coming.result()
                yield answer.answer, answer.stats.ttft_s, answer
            finally:
                closed.set()  # Stop the answer when the page is closed.


def _column(
    mode: Mode, text: str = "", clock_s: float | None = None, stats: ReuseStats | None = None
) -> str:
    clock = "&ndash;" if clock_s is None else f"{clock_s:.2f} s"
    label = "to the first token" if text else "waiting for the first token" if clock_s else ""
    parts = [
        f"<h3>{mode.capitalize()} mode</h3>",
        f'<div class="ba-time">{clock}</div><div class="ba-small">{label}&nbsp;</div>',
        f'<div class="ba-answer">{escape(text)}</div>',
    ]
    if stats and stats.prompt_tokens:
        share = 100 * stats.reused_tokens / stats.prompt_tokens
        parts.append(
            f'<div class="ba-bar"><div class="ba-reused" style="width: {share:.1f}%"></div>'
            f'<div class="ba-computed" style="width: {100 - share:.1f}%"></div></div>'
            f'<div class="ba-small">prompt tokens: {stats.reused_tokens:,} reused, '
            f"{stats.computed_tokens:,} computed</div>"
        )
    return "".join(parts)


def _passages(retrieved: Sequence[Retrieved]) -> str:
    rows = []
    for passage in retrieved:
        kind, tag = ("reused", "reused") if passage.stored else ("computed", "computed now")
        start = " ".join(passage.text.split())[:90]
        rows.append(
            f"<details><summary>{escape(start)} ... <span class='ba-small'>{passage.tokens} tokens"
            f'</span> <span class="ba-tag ba-{kind}">{tag}</span></summary>'
            f'<div class="ba-text">{escape(passage.text)}</div></details>'
        )
    return f"<h3>{len(retrieved)} passages, and what block mode reuses</h3>{''.join(rows)}"


def is_available() -> bool:
    return find_spec("gradio") is not None


def serve_page(race: Race, examples: Sequence[str], on_ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    The server listens on 127.0.0.1 or on ``$GRADIO_SERVER_NAME``, and rejects uploads and requests
    for other host names. ``on_ready`` is called with the page's address.
    """
    import gradio

    with gradio.Blocks(analytics_enabled=False, title="blockattn-rag: two modes") as page:
        gradio.HTML(_STYLE + "<h2>The same question, the same passages, two modes</h2>")
        question = gradio.Textbox(label="Question", value=examples[0] if examples else "")
        button = gradio.Button("Ask in both modes", variant="primary")
        with gradio.Row():
            full, block = gradio.HTML(_column("full")), gradio.HTML(_column("block"))
        passages = gradio.HTML()
        if examples:
            gradio.Examples([[example] for example in examples], question)
        gradio.on(
            [button.click, question.submit], race.run, question, [full, block, passages],
            show_progress="hidden", concurrency_limit=1,
        )  # fmt: skip
    _, url, _ = page.launch(
        share=False, quiet=True, prevent_thread_lock=True, footer_links=[], ssr_mode=False,
        mcp_server=False, app_kwargs={"lifespan": _guarded},
    )  # fmt: skip
    on_ready(url)
    page.block_thread()


@asynccontextmanager
async def _guarded(app: Any) -> AsyncIterator[None]:
    """Lifespan of a server that rejects unknown host names and non-JSON bodies.

    Malicious websites could point their own name to the server's address (DNS rebinding) to read
    its answers, or send forms that fill the disk with uploads. The checks are outside of the app,
    because gradio's middleware adds headers to errors.
    """
    from starlette.datastructures import Headers
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse

    name = os.environ.get("GRADIO_SERVER_NAME", "").strip("[]")
    hosts = {"127.0.0.1", "localhost", f"[{name}]" if ":" in name else name} - {""}
    inner = app.middleware_stack

    async def json_only(scope: Any, receive: Any, send: Any) -> None:
        kinds = Headers(scope=scope).getlist("content-type")
        is_json = kinds == ["application/json"]
        if is_json or scope.get("method") in ("GET", "HEAD", "OPTIONS"):
            await inner(scope, receive, send)
        else:
            refusal = PlainTextResponse("Expected a body of type application/json", 415)
            await refusal(scope, receive, send)

    app.middleware_stack = TrustedHostMiddleware(json_only, [*hosts], www_redirect=False)
    yield
