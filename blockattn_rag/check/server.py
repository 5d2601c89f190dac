"""Server check: asks a question in block mode and in full mode through the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockattn_rag.check.model import CheckReport, CheckRow
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.errors import MissError
from blockattn_rag.server import ServerClient
from blockattn_rag.server.protocol import ServerInfo

QUESTION = "How tall is Halden Tower?"
PASSAGES = (
    "Halden Tower is 214 metres tall. It was built in 1931 by the engineer Tove Lind.",
    "Lake Sorum is 31 metres deep. Ferries cross it in summer, from Halden to Vik.",
)
_NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ServerReport(CheckReport):
    """Results of a server's checks, and its answers in block mode (None: not run) and full mode."""

    info: ServerInfo
    block: str | None
    full: str


def check_server(client: ServerClient) -> ServerReport:
    """Store two passages, and ask about them in full mode, and in block mode in both orders.

    The passages are always the same, so repeated checks leave at most two entries in the store. The
    checks require that block mode uses every passage that is not promoted, and that later questions
    reuse all passages. Answers are not compared between the modes, because they may differ.
    """
    info = client.info
    full, stats = _answer(client, "full", PASSAGES)
    rows = [_row("full mode answers", stats.mode == "full" and bool(full), stats)]
    block: str | None = None
    try:
        stored = client.encode(PASSAGES)
    except MissError as error:  # A read-only server may not have these passages.
        rows.append(CheckRow("passages are not stored", info.read_only, None, None, str(error)))
    else:
        detail = f"{stored.computed} computed, {stored.reused} found"
        rows.append(CheckRow("passages are stored", True, None, None, detail))
        first, computed = _answer(client, "block", PASSAGES)
        block, again = _answer(client, "block", PASSAGES)
        _, turned = _answer(client, "block", PASSAGES[::-1])

        def uses_passages(stats: ReuseStats) -> bool:
            used = stats.hits + stats.misses
            return stats.mode == "block" and used >= len(PASSAGES) - info.promote

        def reuses_passages(stats: ReuseStats) -> bool:
            return uses_passages(stats) and not stats.misses

        rows += [
            _row("block mode answers", uses_passages(computed) and bool(first), computed),
            _row("passages are reused", reuses_passages(again), again),
            _row("the answer is the same again", block == first, again),
            _row("passages are reused in any order", reuses_passages(turned), turned),
        ]
    return ServerReport(client.url, tuple(rows), info, block, full)


def _answer(client: ServerClient, mode: Mode, passages: Sequence[str]) -> tuple[str, ReuseStats]:
    pieces: list[str] = []
    _, stats = client.ask(QUESTION, passages, mode=mode, take=pieces.append, max_tokens=_NEW_TOKENS)
    return "".join(pieces).strip(), stats


def _row(name: str, passed: bool, stats: ReuseStats) -> CheckRow:
    detail = (
        f"{stats.mode} mode, {stats.hits} blocks reused, {stats.misses} computed, first token "
        f"after {stats.ttft_s:.2f} s"
    )
    return CheckRow(name, passed, None, None, detail)
