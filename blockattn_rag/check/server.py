"""Checks that a server answers correctly in block mode, by sending it a probe.

Each run draws new random tokens for the probe, so no other request contains its blocks. Answers are
compared by the log-probabilities of their first token, which are more sensitive than greedy tokens.
The allowed difference is derived from the server's rounding error.
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
from blockattn_rag.check.model import CheckReport, CheckRow, placed_context
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.client.http import Client, RefusedError
from blockattn_rag.server.client.server import Server
from blockattn_rag.server.protocol import (
    COMPLETIONS,
    TENANT_HEADER,
    VERSION,
    EncodeAnswer,
    ServerInfo,
)

_EXACT = 1e-3
"""Maximum difference of log-probabilities in float32, far above the rounding error."""
_COARSE = 0.2
"""Maximum difference for int8 blocks, or between two engines that compute in 16-bit types."""
_NOISE = 8
"""Maximum difference as a multiple of the noise between two equal requests."""


@dataclass(frozen=True, slots=True)
class ServerReport(CheckReport):
    """Results of all checks of one server.

    ``info``: The server's description of itself. ``has_blocks``: Whether block mode was checked.
    ``left_blocks``, ``left_bytes``: Upper limits of what the probe leaves in the server's store.
    """

    info: ServerInfo
    has_blocks: bool
    left_blocks: int
    left_bytes: int


def check_server(
    url: str,
    local: BlockModel | None = None,
    recipe: Recipe | None = None,
    *,
    tokenizer: Any = None,
    served_name: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    source: random.Random | None = None,
) -> ServerReport:
    """Run every check on a server.

    One block of the probe is stored, unless the server is read-only. The other blocks stay in the
    server's memory if it can keep blocks there; otherwise they are stored, too. A server that can
    do neither is not checked in block mode.

    Args:
        url: Address of the server.
        local: The served model, loaded in this process, to compare answers with.
        recipe: The server's recipe. Required with ``local`` if the recipe has more than a sink.
        tokenizer: Tokenizer, as for ``RemoteEngine``. Default: the local model's.
        served_name: Name of the served model, as ``model`` of ``RemoteEngine``.
        api_key: API key of the server.
        timeout_s: Seconds to wait for the next byte of a response.
        source: Source of the probe's random tokens. Default: the system's.

    Raises:
        ServingError: the server cannot be reached, refuses or fails, lacks the connector, has
            another tokenizer, or speaks another version of the protocol.
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
        recipe = recipe or Recipe(info.sink)
        rows += _local_rows(local, recipe, info, probe, full, blocks)
    rows += _time_rows(probe, full, blocks)
    left_bytes = 0 if blocks is None else blocks.stored_bytes(probe)
    url = server.client.base_url
    return ServerReport(url, tuple(rows), info, blocks is not None, len(probe.stored), left_bytes)


class _Full(NamedTuple):
    """Full-mode answers: ``whole`` (cold), ``again`` (cached pages), ``here`` (own endpoint)."""

    whole: Answer
    again: Answer
    here: Answer

    @property
    def budget(self) -> float:
        """Maximum difference between answers that should be equal except for rounding."""
        return max(_EXACT, _NOISE * self.whole.distance(self.again.likely))


def _asked_in_full(asker: Asker, probe: Probe, salt: str) -> _Full:
    """Request the full-mode answers. ``salt`` must be unused, so that the first one is cold."""
    ask = partial(asker.full, probe.ids, salt)
    return _Full(ask(), ask(), ask(COMPLETIONS))


class _Blocks(NamedTuple):
    """Answers in block mode, in request order. Each might wrongly reuse KV pages of earlier ones.

    Args:
        encoded: Result of encoding the first block. None if the server is read-only.
        found: Result of looking that block up. None if the server is read-only.
        missed: Answer from all three blocks, on first use.
        full: Full-mode answer to the same tokens.
        one: Answer to the same tokens with the first block as context.
        two: Answer to the same tokens with the first two blocks as context.
        again: Answer to the request of ``missed``, repeated.
        hit: Answer from the three blocks in another order.
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
        """Upper limit of the bytes that the probe's blocks occupy in the store, estimated from the
        first block. Being short, that block takes the most bytes per token in int8."""
        tokens = sum(len(ids) for ids in probe.stored)
        bytes_ = 0 if self.encoded is None else self.encoded.stored_bytes
        return bytes_ * tokens // len(probe.blocks[0])

    def budget(self, full: _Full) -> float:
        """Maximum difference of answers from stored blocks."""
        return max(full.budget, _COARSE if self.hit.served.int8_blocks else 0.0)


def _asked_in_blocks(asker: Asker, drawn: Probe, info: ServerInfo) -> tuple[Probe, _Blocks | None]:
    """Request the block-mode answers, with blocks kept in the server's memory if possible. Also
    returns the probe with the ``keep`` that was used."""
    kept = (IN_MEMORY if info.read_only else STORED, IN_MEMORY, PRIVATE)
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
            return drawn._replace(keep=(IN_MEMORY,) * 3), None
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
        f"{', '.join(info.models)} ({info.fingerprint[:12]}), recipe {info.recipe}, protocol "
        f"{VERSION}, {'read-only' if info.read_only else 'encodes blocks'}, same tokenizer"
    )
    return CheckRow("this package's endpoints", True, None, None, detail)


def _row(name: str, value: float, budget: float, detail: str, to_do: str) -> CheckRow:
    """Row that fails if the value exceeds its budget. A failure's detail includes ``to_do``."""
    passed = value <= budget
    return CheckRow(name, passed, value, budget, detail if passed else f"{detail}; {to_do}")


def _near(name: str, found: Answer, expected: Answer, budget: float, to_do: str) -> CheckRow:
    detail = f"log-probabilities of the {LIKELIEST} likeliest first tokens"
    return _row(name, found.distance(expected.likely), budget, detail, to_do)


def _route_row(full: _Full) -> CheckRow:
    name, to_do = "full mode = vLLM's own route", "something on the way changes requests"
    return _near(name, full.here, full.whole, full.budget, to_do)


def _block_rows(full: _Full, seen: _Blocks, probe: Probe) -> Iterator[CheckRow]:
    """Rows for block mode that do not need the local model."""
    budget = seen.budget(full)
    yield _once_row(seen, probe)
    difference = seen.missed.distance(full.whole.likely)
    differs = difference > full.budget
    detail = f"log-probabilities differ by more than {full.budget:.0e}"
    if not differs:
        detail = (
            f"expected a difference above {full.budget:.0e}: the server reports block mode, but "
            "does not use it; make this package's connector the only one"
        )
    yield CheckRow("block mode is not full mode", differs, difference, None, detail)
    to_do = "loaded keys and values differ from computed ones; does the profile fit the model?"
    yield _near("one block = full mode", seen.one, full.whole, budget, to_do)
    to_do = "different prompts share KV pages; make this package's connector the only one"
    yield _near("full mode after block mode", seen.full, full.whole, full.budget, to_do)
    row = _near("block mode after full mode", seen.again, seen.missed, budget, to_do)
    yield replace(row, detail=f"{row.detail}; {seen.again.served.local_tokens} from own pages")
    first = (seen.missed, seen.one, seen.two, seen.hit)
    detail = "tokens that new cuts reuse from the engine's own cache"
    shared = sum(answer.served.local_tokens for answer in first)
    yield _row("another cut shares no pages", float(shared), 0.0, detail, to_do)


def _once_row(seen: _Blocks, probe: Probe) -> CheckRow:
    """Row that checks that each block is encoded on first use, and never again."""
    alone = [one.blocks[0] for one in (seen.encoded, seen.found) if one is not None]
    new = len(probe.blocks) - (seen.encoded is not None)
    later = sum(one.served.encoded for one in (seen.one, seen.two, seen.again, seen.hit))
    wrong = (alone not in ([], ["encoded", "found"])) + abs(seen.missed.served.encoded - new)
    counts = [*alone, f"{seen.missed.served.encoded} for the first answer", f"{later} later"]
    to_do = f"expected encoded, found, {new} and 0; does the server keep the blocks it encodes?"
    detail = f"{', '.join(counts)}; {len(probe.stored)} of {len(probe.blocks)} stored"
    return _row("blocks are encoded once", float(wrong + later), 0.0, detail, to_do)


def _tenant_row(as_tenant: Server, info: ServerInfo, probe: Probe, tenant: str) -> CheckRow:
    """Row that checks that a tenant cannot find the probe's stored block."""
    name = "tenants are kept apart"
    try:
        theirs = as_tenant.info_now().namespace
    except RefusedError as error:
        if error.status != 400:
            raise
        return CheckRow(name, True, None, None, f"no tenants: the server refuses {TENANT_HEADER}")
    if theirs != tenant:
        detail = f"{TENANT_HEADER} is set or stripped on the way: requests arrive as {theirs!r}"
        return CheckRow(name, theirs == info.namespace, None, None, detail)
    (outcome,) = Asker(as_tenant).first(probe.blocks[0], only_look=True).blocks
    detail = f"a block of {info.namespace!r} is {outcome} for {tenant!r}"
    to_do = "expected missing, unless the connector's option read_namespaces includes it"
    return _row(name, float(outcome != "missing"), 0.0, detail, to_do)


def _local_rows(
    local: BlockModel,
    recipe: Recipe,
    info: ServerInfo,
    probe: Probe,
    full: _Full,
    seen: _Blocks | None,
) -> Iterator[CheckRow]:
    """Rows that compare the answers with those of the same model and recipe in this process."""
    name, found, expected = "fingerprint = local model's", info.fingerprint, local.fingerprint
    if found != expected:
        detail = (
            f"found {found[:12]}, expected {expected[:12]}; pass the server's dtype as --dtype, "
            "and serve the profile of this model: blockattn-rag check MODEL --profile FILE"
        )
        yield CheckRow(name, False, None, None, detail)
        return
    yield CheckRow(name, True, None, None, found[:12])
    is_exact = local.dtype in (torch.float32, torch.float64)
    near = max(full.budget, _EXACT if is_exact else _COARSE)
    to_do = "the server computes other values than transformers; does it serve these weights?"
    likely = _likely(local.next_logits(torch.tensor([probe.ids])))
    detail = f"log-probabilities of the {LIKELIEST} likeliest first tokens"
    yield _row("full mode = local model", full.whole.distance(likely), near, detail, to_do)
    if seen is None:
        return
    name, is_same = "recipe = local recipe", recipe.outline == info.recipe
    detail = f"found {info.recipe}, expected {recipe}; pass the server's recipe as --recipe"
    yield CheckRow(name, is_same, None, None, str(recipe) if is_same else detail)
    if not is_same:
        return
    context = placed_context(local, probe.blocks, sink_ids(recipe.sink, local.tokenizer), recipe)
    detail = f"log-probabilities of the {LIKELIEST} likeliest first tokens"
    likely = _likely(local.next_logits(torch.tensor([probe.final]), local.cache_for(context)))
    near = max(near, seen.budget(full))
    yield _row("block mode = local model", seen.missed.distance(likely), near, detail, to_do)
    options = Sampling(max_new_tokens=NEW_TOKENS, extra={"min_new_tokens": NEW_TOKENS})
    cache = local.cache_for(context)
    tokens = tuple(local.generate(context.token_ids, probe.final, options, cache=cache))
    differ = tokens != seen.missed.tokens
    # 16-bit rounding may flip a near tie; the rows above cover these types.
    passed = not differ or near > _EXACT
    detail = f"{NEW_TOKENS} tokens" + (f", found {seen.missed.tokens}, expected {tokens}" * differ)
    yield CheckRow("greedy tokens = local model", passed, float(differ), 0.0, detail)


def _likely(logits: Tensor) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens, from logits ``[vocab]``."""
    values, tokens = logits.double().log_softmax(-1).topk(LIKELIEST)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


def _time_rows(probe: Probe, full: _Full, seen: _Blocks | None) -> Iterator[CheckRow]:
    """Rows for the time to the first token."""
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
