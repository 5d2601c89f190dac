"""Does a server answer in block mode as it should? Measured from outside, by a probe.

The probe's tokens are drawn for each run: nobody else has its blocks, before or after. Answers are
compared by the log-probabilities of their first token, which tell apart what greedy tokens may not,
and by how much rounding alone moves them on this server.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockattn_rag.check.asking import LIKELIEST, NEW_TOKENS, Answer, Asker, Probe
from blockattn_rag.check.checks import CheckReport, CheckRow, placed_context
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import Keep
from blockattn_rag.server.client.http import Client, RefusedError
from blockattn_rag.server.client.server import Server
from blockattn_rag.server.profile import profile_of
from blockattn_rag.server.protocol import (
    COMPLETIONS,
    TENANT_HEADER,
    VERSION,
    EncodeAnswer,
    ServerInfo,
)

_EXACT = 1e-3
"""Difference of log-probabilities below which rounding in float32 stays by far."""
_COARSE = 0.2
"""The same, where blocks are stored in int8, or two engines round 16-bit types."""
_NOISE = 8
"""How many times the noise that was measured once an answer may differ."""


@dataclass(frozen=True, slots=True)
class ServerReport(CheckReport):
    """All properties of one server.

    ``info``: what it tells of itself. ``has_blocks``: whether block mode could be asked for.
    ``left_blocks``, ``left_bytes``: what the probe leaves in its store, at most.
    """

    info: ServerInfo
    has_blocks: bool
    left_blocks: int
    left_bytes: int


def check_server(
    url: str,
    local: BlockModel | None = None,
    *,
    tokenizer: Any = None,
    served_name: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    source: random.Random | None = None,
) -> ServerReport:
    """Run every check on a server.

    Of the probe's blocks one is stored, where that may be. The others stay in the server's memory
    if it keeps such blocks; if not, they are stored too. Where neither may be, block mode is not
    asked for.

    Args:
        url: its address.
        local: its model in this process, to compare answers with.
        tokenizer: as ``RemoteEngine``; default: the local model's.
        served_name: as ``RemoteEngine``'s ``model``.
        api_key: of the server.
        timeout_s: seconds without a byte of an answer after which it is given up.
        source: what the probe's tokens are drawn from; default: the system's randomness.

    Raises:
        ServingError: it cannot be reached, refuses or fails, lacks the connector, has another
            tokenizer, or speaks another version of the protocol.
    """
    if tokenizer is None and local is not None:
        tokenizer = local.tokenizer
    source = source or random.SystemRandom()
    name = f"check-{source.getrandbits(64):016x}"
    connect = partial(Client, url, api_key, timeout_s, 0)
    server = Server(connect(), served_name, tokenizer, None)
    info, tokenizer = server.info_now(), server.model.tokenizer
    drawn = Probe.drawn(tokenizer.tokenizer, source)
    full = _asked_in_full(Asker(server), drawn, name)
    probe, blocks = _asked_in_blocks(Asker(server), drawn, info)
    rows = [_info_row(info), _route_row(full)]
    if blocks is not None:
        rows += _block_rows(full, blocks, probe)
    if probe.stored:
        as_tenant = Server(connect({TENANT_HEADER: name}), served_name, tokenizer, None)
        rows.append(_tenant_row(as_tenant, info, probe, name))
    if local is not None:
        rows += _local_rows(local, info, probe, full, blocks)
    rows += _time_rows(probe, full, blocks)
    left_bytes = 0 if blocks is None else blocks.stored_bytes(probe)
    url = server.client.base_url
    return ServerReport(url, tuple(rows), info, blocks is not None, len(probe.stored), left_bytes)


class _Full(NamedTuple):
    """Answers in full mode: computed whole; again, from pages of its own; by our endpoint."""

    whole: Answer
    again: Answer
    here: Answer

    @property
    def budget(self) -> float:
        """How far answers may differ that are equal but for rounding."""
        return max(_EXACT, _NOISE * self.whole.distance(self.again.likely))


def _asked_in_full(asker: Asker, probe: Probe, salt: str) -> _Full:
    """``salt``: nobody else has pages under it, so that the first answer is right."""
    ask = partial(asker.full, probe.ids, salt)
    return _Full(ask(), ask(), ask(COMPLETIONS))


class _Blocks(NamedTuple):
    """Answers in block mode, each of which might take what those before it left in the engine.

    Args:
        encoded: the first block, encoded, and ``found`` again; none where nothing is stored.
        missed: an answer from three blocks, of which the others are new.
        full: full mode after that.
        one: the same tokens with one block as context, and with ``two``.
        again: as the first.
        hit: from the three blocks, in another order.
    """

    encoded: EncodeAnswer | None
    found: EncodeAnswer | None
    missed: Answer
    full: Answer
    one: Answer
    two: Answer
    again: Answer
    hit: Answer

    def stored_bytes(self, probe: Probe) -> int:
        """Of all the probe's blocks in the store, at most: a short block in int8, as the first one
        is, takes more for each token than others."""
        tokens = sum(len(ids) for ids in probe.stored)
        bytes_ = 0 if self.encoded is None else self.encoded.stored_bytes
        return bytes_ * tokens // len(probe.blocks[0])

    def budget(self, full: _Full) -> float:
        """How far answers from stored blocks may differ."""
        return max(full.budget, _COARSE if self.hit.served.int8_blocks else 0.0)


def _asked_in_blocks(asker: Asker, drawn: Probe, info: ServerInfo) -> tuple[Probe, _Blocks | None]:
    """The answers, and the probe with what may become of its blocks: as much as the server keeps
    stays in its memory."""
    kept: tuple[Keep, ...] = ("memory" if info.read_only else "store", "memory", "private")
    encoded = found = None
    if not info.read_only:
        encoded = asker.first(drawn.blocks[0])
        found = asker.first(drawn.blocks[0], only_look=True)
    probe = drawn._replace(keep=kept)
    try:
        missed = asker.block(probe)
    except RefusedError as error:
        if error.status != 400 or "private_memory" not in str(error):
            raise
        if info.read_only:
            return drawn._replace(keep=("memory",) * 3), None
        probe = drawn
        missed = asker.block(probe)
    return probe, _Blocks(
        encoded,
        found,
        missed,
        asker.full(probe.ids),
        asker.block(probe.cut(1)),
        asker.block(probe.cut(2)),
        asker.block(probe),
        asker.block(probe.turned()),
    )


def _info_row(info: ServerInfo) -> CheckRow:
    detail = (
        f"{', '.join(info.models)} ({info.fingerprint[:12]}), sink {info.sink}, protocol "
        f"{VERSION}, {'read-only' if info.read_only else 'encodes'}, tokenizer as here"
    )
    return CheckRow("this package's endpoints", True, None, None, detail)


def _row(name: str, value: float, budget: float, detail: str, to_do: str) -> CheckRow:
    """A row that fails where the value is above its budget; then it says what to do."""
    passed = value <= budget
    return CheckRow(name, passed, value, budget, detail if passed else f"{detail}; {to_do}")


def _near(name: str, found: Answer, expected: Answer, budget: float, to_do: str) -> CheckRow:
    detail = f"log-probabilities of the {LIKELIEST} likeliest first tokens"
    return _row(name, found.distance(expected.likely), budget, detail, to_do)


def _route_row(full: _Full) -> CheckRow:
    name, to_do = "full mode = vLLM's own route", "something between them changes requests"
    return _near(name, full.here, full.whole, full.budget, to_do)


def _block_rows(full: _Full, seen: _Blocks, probe: Probe) -> Iterator[CheckRow]:
    """What can be told of block mode without the model."""
    budget = seen.budget(full)
    yield _once_row(seen, probe)
    difference = seen.missed.distance(full.whole.likely)
    differs = difference > full.budget
    detail = f"log-probabilities differ by more than {full.budget:.0e}"
    if not differs:
        detail = (
            f"expected a difference above {full.budget:.0e}: the server says that it answers in "
            "block mode, and does not; make this package's connector its only one"
        )
    yield CheckRow("block mode is not full mode", differs, difference, None, detail)
    to_do = "keys and values are not loaded as they were computed; is the profile this model's?"
    yield _near("one block = full mode", seen.one, full.whole, budget, to_do)
    to_do = "requests share pages that differ; make this package's connector the only one"
    yield _near("full mode after block mode", seen.full, full.whole, full.budget, to_do)
    row = _near("block mode after full mode", seen.again, seen.missed, budget, to_do)
    yield replace(row, detail=f"{row.detail}; {seen.again.served.local_tokens} from own pages")
    first = (seen.missed, seen.one, seen.two, seen.hit)
    detail = "tokens taken from the engine's own cache by cuts that are new to it"
    shared = sum(answer.served.local_tokens for answer in first)
    yield _row("another cut shares no pages", float(shared), 0.0, detail, to_do)


def _once_row(seen: _Blocks, probe: Probe) -> CheckRow:
    """Whether each block was encoded when it was first asked for, and never again."""
    alone = [one.blocks[0] for one in (seen.encoded, seen.found) if one is not None]
    new = len(probe.blocks) - (seen.encoded is not None)
    later = sum(one.served.encoded for one in (seen.one, seen.two, seen.again, seen.hit))
    wrong = (alone not in ([], ["encoded", "found"])) + abs(seen.missed.served.encoded - new)
    counts = [*alone, f"{seen.missed.served.encoded} for the first answer", f"{later} later"]
    to_do = f"expected encoded, found, {new} and 0. Does the server keep what it encodes?"
    detail = f"{', '.join(counts)}; {len(probe.stored)} of {len(probe.blocks)} stored"
    return _row("blocks are encoded once", float(wrong + later), 0.0, detail, to_do)


def _tenant_row(as_tenant: Server, info: ServerInfo, probe: Probe, tenant: str) -> CheckRow:
    """Whether a tenant finds what the probe left for whoever names none."""
    name = "tenants are kept apart"
    try:
        theirs = as_tenant.info_now().namespace
    except RefusedError as error:
        if error.status != 400:
            raise
        return CheckRow(name, True, None, None, f"there are none: {TENANT_HEADER} is refused")
    if theirs != tenant:
        detail = f"{TENANT_HEADER} is set or stripped on the way: from here, all are {theirs!r}"
        return CheckRow(name, theirs == info.namespace, None, None, detail)
    (outcome,) = Asker(as_tenant).first(probe.blocks[0], only_look=True).blocks
    detail = f"a block of {info.namespace!r} is {outcome} for {tenant!r}"
    to_do = "expected missing, unless read_namespaces in the connector's options has it"
    return _row(name, float(outcome != "missing"), 0.0, detail, to_do)


def _local_rows(
    local: BlockModel, info: ServerInfo, probe: Probe, full: _Full, seen: _Blocks | None
) -> Iterator[CheckRow]:
    """Answers beside those of the same model in this process."""
    name, found, expected = "fingerprint = local model's", info.fingerprint, local.fingerprint
    if found != expected:
        detail = (
            f"found {found[:12]}, expected {expected[:12]}; give --dtype as it is there, and serve "
            "what was measured: blockattn-rag check MODEL --profile FILE"
        )
        yield CheckRow(name, False, None, None, detail)
        return
    yield CheckRow(name, True, None, None, found[:12])
    is_exact = local.dtype in (torch.float32, torch.float64)
    near = max(full.budget, _EXACT if is_exact else _COARSE)
    to_do = "the server computes otherwise than transformers; does it serve these weights?"
    likely = _likely(local.next_logits(torch.tensor([probe.ids])))
    detail = f"log-probabilities of the {LIKELIEST} likeliest first tokens"
    yield _row("full mode = local model", full.whole.distance(likely), near, detail, to_do)
    if seen is None:
        return
    sink = profile_of(local, info.sink).sink_ids
    context = placed_context(local, probe.blocks, sink)
    likely = _likely(local.next_logits(torch.tensor([probe.final]), local.cache_for(context)))
    near = max(near, seen.budget(full))
    yield _row("block mode = local model", seen.missed.distance(likely), near, detail, to_do)
    options = Sampling(max_new_tokens=NEW_TOKENS, extra={"min_new_tokens": NEW_TOKENS})
    cache = local.cache_for(context)
    tokens = tuple(local.generate(context.token_ids, probe.final, options, cache=cache))
    differ = tokens != seen.missed.tokens
    # 16-bit rounding may turn a near tie; the rows above judge those types.
    passed = not differ or near > _EXACT
    detail = f"{NEW_TOKENS} tokens" + (f", found {seen.missed.tokens} for {tokens}" * differ)
    yield CheckRow("greedy tokens = local model", passed, float(differ), 0.0, detail)


def _likely(logits: Tensor) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens, of logits ``[vocab]``."""
    values, tokens = logits.double().log_softmax(-1).topk(LIKELIEST)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


def _time_rows(probe: Probe, full: _Full, seen: _Blocks | None) -> Iterator[CheckRow]:
    """Seconds to the first token."""
    if seen is None:
        yield _time_row("full mode", full.whole, f"{len(probe.ids)} tokens computed")
        return
    yield _time_row("full mode", seen.full, f"{len(probe.ids)} tokens computed")
    for name, answer in (("miss", seen.missed), ("hit", seen.hit)):
        said = answer.served
        yield _time_row(
            name,
            answer,
            f"{len(probe.final) + said.encoded_tokens} tokens computed, {said.loaded_tokens} "
            f"loaded in {1000 * said.fetch_s:.0f} ms",
        )


def _time_row(name: str, answer: Answer, detail: str) -> CheckRow:
    return CheckRow(f"first token: {name}", True, answer.ttft_s, None, f"seconds; {detail}")
