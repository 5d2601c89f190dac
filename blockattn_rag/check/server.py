"""Server check: asks a question in block mode and in full mode through the OpenAI route."""

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
    """Results of all checks of one server."""

    info: ServerInfo
    block: str | None
    full: str


@dataclass(frozen=True, slots=True)
class _Asked:
    text: str
    stats: ReuseStats


def check_server(client: ServerClient) -> ServerReport:
    """Store passages, then ask a question in both modes, and with the passages in another order.

    The passages are always the same, so repeated checks leave at most two entries in the store. The
    checks require that block mode uses every passage, and that each passage is encoded once.
    Answers may differ between the modes if the model is not block-fine-tuned.
    """
    info = client.info
    full = _asked(client, "full", PASSAGES)
    rows = [_row("full mode answers", full.stats.mode == "full" and bool(full.text), full.stats)]
    block = None
    try:
        stored = client.encode(PASSAGES)
    except MissError as error:  # A read-only server may not have these passages.
        rows.append(CheckRow("passages are not stored", info.read_only, None, None, str(error)))
    else:
        detail = f"{stored.computed} computed, {stored.reused} found"
        rows.append(CheckRow("passages are stored", True, None, None, detail))
        first = _asked(client, "block", PASSAGES)
        again = _asked(client, "block", PASSAGES)
        turned = _asked(client, "block", PASSAGES[::-1])
        block = again.text
        known = len(PASSAGES) - info.promote
        rows += [
            _row("block mode answers", _uses(first.stats, known) and bool(first.text), first.stats),
            _row("passages are reused", _reuses(again.stats, known), again.stats),
            _row("the answer is the same again", again.text == first.text, again.stats),
            _row("passages are reused in any order", _reuses(turned.stats, known), turned.stats),
        ]
    return ServerReport(client.url, tuple(rows), info, block, full.text)


def _asked(client: ServerClient, mode: Mode, passages: Sequence[str]) -> _Asked:
    pieces: list[str] = []
    _, stats = client.ask(QUESTION, passages, mode=mode, take=pieces.append, max_tokens=_NEW_TOKENS)
    return _Asked("".join(pieces).strip(), stats)


def _uses(stats: ReuseStats, passages: int) -> bool:
    return stats.mode == "block" and stats.hits + stats.misses >= passages


def _reuses(stats: ReuseStats, passages: int) -> bool:
    return _uses(stats, passages) and not stats.misses


def _row(name: str, passed: bool, stats: ReuseStats) -> CheckRow:
    detail = (
        f"{stats.mode} mode, {stats.hits} blocks reused, {stats.misses} computed, first token "
        f"after {stats.ttft_s:.2f} s"
    )
    return CheckRow(name, passed, None, None, detail)
