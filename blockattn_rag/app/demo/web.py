"""Web page that answers a question in full mode and block mode, side by side.

Questions, passages and answers are untrusted, so this module escapes all displayed text. Only
``serve_page`` requires gradio.
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
from typing import Any, NamedTuple, get_args

from blockattn_rag.app.rag.ask import Assistant
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


class Columns(NamedTuple):
    """Parts of the page, as HTML."""

    full: str
    block: str
    passages: str


class Race:
    """Comparison of both modes, which run one after the other so that neither slows the other."""

    def __init__(self, database: Database, top_k: int = 6) -> None:
        self._database, self._top_k = database, top_k
        self.assistant = Assistant(database, top_k=top_k, max_new_tokens=MAX_NEW_TOKENS)

    def run(self, question: str) -> Iterator[Columns]:
        """Answer a question in both modes. Yields the page whenever it changes."""
        question = question.strip()
        shown = Columns(_column("full"), _column("block"), "")
        if not question:
            yield shown._replace(passages="Type a question.")
            return
        try:
            shown = shown._replace(passages=self._passages(question))
            yield shown
            ttft_s: dict[Mode, float] = {}
            for mode in get_args(Mode):
                for text, clock_s, stats in self._stream(question, mode):
                    shown = shown._replace(**{mode: _column(mode, text, clock_s, stats)})
                    ttft_s[mode] = clock_s
                    yield shown
            ratio = ttft_s["full"] / ttft_s["block"]
            gain = f"<p><b>First token {speedup(ratio)} in block mode.</b></p>"
            yield shown._replace(passages=gain + shown.passages)
        except Exception as error:
            logger.exception("Cannot answer %r", question)
            yield shown._replace(passages=f"<b>Error:</b> {escape(str(error))}")

    def _passages(self, question: str) -> str:
        """Return the retrieved passages as HTML, each marked as reused or computed."""
        engine, rows = self._database.engine, []
        for passage in retriever(self._database)(question, self._top_k):
            block = Block(passage.text, self._database.template)
            tokens = len(engine.model.tokenizer.block_ids(block, first=False))
            kind, tag = "computed", "computed now"
            if engine.contains(block):
                kind = tag = "reused"
            start = " ".join(passage.text.split())[:90]
            rows.append(
                f"<details><summary>{escape(start)} ... <span class='ba-small'>{tokens} tokens"
                f'</span> <span class="ba-tag ba-{kind}">{tag}</span></summary>'
                f'<div class="ba-text">{escape(passage.text)}</div></details>'
            )
        return f"<h3>{len(rows)} passages, and what block mode reuses</h3>{''.join(rows)}"

    def _stream(self, question: str, mode: Mode) -> Iterator[tuple[str, float, ReuseStats | None]]:
        """Yield the text so far, the seconds until the first token (or until now), and the
        statistics, which are None until the answer is complete."""
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
                yield answer.answer, answer.stats.ttft_s, answer.stats
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


def speedup(ratio: float) -> str:
    """Format full mode's time over block mode's: ``3.5 times sooner`` or ``1.2 times later``."""
    return f"{ratio:.1f} times sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"


def is_available() -> bool:
    return find_spec("gradio") is not None


def serve_page(race: Race, examples: Sequence[str], on_ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    The server listens on ``$GRADIO_SERVER_NAME`` or, by default, on 127.0.0.1. It rejects uploads
    and requests for other host names. ``on_ready`` is called with the page's address.
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
    its answers, or send forms that fill the disk with uploads. The checks run before gradio's
    middleware, which would otherwise add headers to error responses.
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
