"""Check that a tenant of a server cannot detect, use or damage another tenant's blocks.

    python benchmarks/serving_tenants.py --probes 150

vLLM serves the bundled model with a tenant secret. Tenant A requests passages that tenant B stored,
passages that nobody stored, and its own, in turns and through every route. For B's and nobody's
passages, the server must return the same figures, and its response times must not differ: the
bootstrap interval of the probability that a passage of B is answered faster (the area under the ROC
curve) must contain 0.5, at a level of 95 % for all routes together. A's own passages show that the
test would detect a leak. Then A tries to read and damage B's blocks. Exit status 1 if an attempt
succeeds.

It runs in the environment of `make test-vllm`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import typer
from serving_load import ENVIRONMENT, host, write
from tables import markdown

from blockattn_rag.server.keys import salt
from blockattn_rag.server.protocol import COMPLETIONS, ENCODE, OPENAI, BlockPlan
from tests_vllm.reference import SYSTEM, TOKENS, Case, Reference
from tests_vllm.server import Server

OWNERS = ("B", "nobody", "A")
PASSAGE_TOKENS = 400
"""Tokens per passage, so many that computing them dominates the time of a request."""

PASSAGES = 2

_INDEXED_S = 15.0


def auc(scores: np.ndarray, happened: np.ndarray) -> float:
    """Area under the ROC curve of scores for an event; ties count half.

    Raises:
        ValueError: The event happened never or always.
    """
    if happened.all() or not happened.any():
        raise ValueError(
            f"found {happened.sum()} events in {len(happened)} trials, expected at least one event "
            "and one trial without: increase --probes"
        )
    yes, no = scores[happened], scores[~happened]
    above = (yes[:, None] > no).mean()
    return float(above + (yes[:, None] == no).mean() / 2)


def interval(
    scores: np.ndarray, happened: np.ndarray, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of ``auc``; raises the same errors."""
    auc(scores, happened)  # raises if no resampling could contain both outcomes
    draw = np.random.default_rng(seed)
    found: list[float] = []
    while len(found) < 2000:
        rows = draw.integers(len(scores), size=len(scores))
        if 0 < happened[rows].sum() < len(rows):
            found.append(auc(scores[rows], happened[rows]))
    low, high = np.quantile(found, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


class Tenants:
    """A server with two tenants, A and B, and prompts of new passages.

    Args:
        reference: Reference answers of the served model.
        server: A server with a tenant secret.
    """

    def __init__(self, reference: Reference, server: Server) -> None:
        self.reference = reference
        self.server = server
        self._choose = random.Random(0)

    def case(self) -> Case:
        """A prompt of new passages of equal length."""
        words = ["a", "in", "of", "the", "to"]
        texts = []
        for _ in range(PASSAGES):
            text = "".join(f" {self._choose.choice(words)}" for _ in range(4 * PASSAGE_TOKENS))
            texts.append(text)
        ids = self.reference.case_of((SYSTEM, *texts, "Question: What?\nAnswer:"))
        return self._cut_to_length(ids)

    @staticmethod
    def _cut_to_length(case: Case) -> Case:
        blocks = [case.blocks[0], *(block[:PASSAGE_TOKENS] for block in case.blocks[1:])]
        final = case.ids[sum(case.lengths) :]
        lengths = tuple(len(block) for block in blocks)
        return Case(case.texts, [*itertools.chain(*blocks), *final], lengths)

    def store(self, case: Case, owner: str, way: str) -> None:
        """Store a prompt's blocks for a tenant, and compute its context in full mode."""
        if owner == "nobody":
            return
        if way in (documents.__name__, plain_text.__name__):
            self.chat(owner, case)
            return
        self.post(owner, ENCODE, {"blocks": case.blocks, "opens_prompt": True})
        self.complete(owner, case, plan=False)

    def post(self, tenant: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.server.post(path, body, **{"x-tenant-id": tenant})
        if not answer.is_success:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        body: dict[str, Any] = answer.json()
        return body

    def complete(
        self, tenant: str, case: Case, *, plan: bool = True, tokens: int = 1
    ) -> dict[str, Any]:
        """The answer to a prompt in block mode, or in full mode."""
        body: dict[str, Any] = {"prompt": case.ids, "max_tokens": tokens, "min_tokens": tokens}
        body |= {"temperature": 0, "return_token_ids": True}
        if plan:
            body["kv_transfer_params"] = case.params
        return self.post(tenant, COMPLETIONS, body)

    def chat(self, tenant: str, case: Case, *, marks: bool = True) -> Any:
        """Figures of the answer to a chat, with the passages as documents or in plain text."""
        _, *passages, question = case.texts
        body: dict[str, Any] = {
            "documents": [{"text": " ".join(text.split()[:PASSAGE_TOKENS])} for text in passages]
        }
        if not marks:
            texts = [f"<source>{one['text']}</source>" for one in body.pop("documents")]
            question = "\n".join([*texts, question])
        body |= {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
        answer = self.post(tenant, f"{OPENAI}/chat/completions", body)
        return [answer["blockattn"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]]


def look(tenants: Tenants, case: Case) -> Any:
    """Request which blocks are stored."""
    body = {"blocks": case.blocks, "opens_prompt": True, "only_look": True}
    return tenants.post("A", ENCODE, body)["blocks"][1:]


def encode(tenants: Tenants, case: Case) -> Any:
    """Store blocks."""
    return tenants.post("A", ENCODE, {"blocks": case.blocks, "opens_prompt": True})["blocks"][1:]


def in_block_mode(tenants: Tenants, case: Case) -> Any:
    """Ask for an answer in block mode."""
    answer = tenants.complete("A", case)["kv_transfer_params"]["blockattn"]
    return {name: answer[name] for name in ("encoded", "encoded_tokens")}


def in_full_mode(tenants: Tenants, case: Case) -> Any:
    """Ask for an answer in full mode."""
    tenants.complete("A", case, plan=False)


def documents(tenants: Tenants, case: Case) -> Any:
    """Ask as an OpenAI client with documents."""
    return tenants.chat("A", case)


def plain_text(tenants: Tenants, case: Case) -> Any:
    """Ask as an OpenAI client with passages in plain text, which the server recognizes."""
    return tenants.chat("A", case, marks=False)


WAYS: Mapping[str, Callable[[Tenants, Case], Any]] = {
    one.__name__: one for one in (look, encode, in_block_mode, in_full_mode, documents, plain_text)
}


def probed(
    tenants: Tenants, probes: int, on_progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Try each route on the passages of each owner, in random order.

    Returns:
        The server's figures and the seconds of each trial.
    """
    rows, order = [], random.Random(1)
    pasted = [{owner: tenants.case() for owner in OWNERS} for _ in range(probes + 2)]
    for cases_of in pasted:  # before all others, because the index is written after a few seconds
        for owner, case in cases_of.items():
            tenants.store(case, owner, plain_text.__name__)
    time.sleep(_INDEXED_S)
    plain_text(tenants, tenants.case())  # reads the index
    time.sleep(1)
    for number in range(probes + 2):
        turn = [(way, owner) for way in WAYS for owner in OWNERS]
        cases = {one: tenants.case() for one in turn if one[0] != plain_text.__name__}
        for (way, owner), case in cases.items():
            tenants.store(case, owner, way)
        cases |= {(plain_text.__name__, owner): pasted[number][owner] for owner in OWNERS}
        order.shuffle(turn)
        for way, owner in turn:
            began = time.perf_counter()
            said = WAYS[way](tenants, cases[way, owner])
            seconds = time.perf_counter() - began
            if number >= 2:  # the first trials are a warm-up
                rows.append({"way": way, "owner": owner, "said": said, "seconds": seconds})
        on_progress(number)
    return rows


def compared(rows: list[dict[str, Any]], way: str, owner: str) -> dict[str, Any]:
    """Compare an owner's passages with passages that nobody stored."""
    of = {one: [row for row in rows if (row["way"], row["owner"]) == (way, one)] for one in OWNERS}
    both = [*of[owner], *of["nobody"]]
    scores = np.array([-row["seconds"] for row in both])
    is_owners = np.array([row["owner"] == owner for row in both])
    medians = {one: float(np.median([row["seconds"] for row in of[one]])) for one in OWNERS}
    return {
        "way": way,
        "owner": owner,
        "median_s": medians[owner],
        "median_of_nobodys_s": medians["nobody"],
        "faster": auc(scores, is_owners),
        "faster_within": interval(scores, is_owners, level=1 - 0.05 / len(WAYS)),
        "says_the_same": {json.dumps(row["said"]) for row in of[owner]}
        == {json.dumps(row["said"]) for row in of["nobody"]},
    }


def attacks(tenants: Tenants) -> dict[str, bool]:
    """Whether each attack of A on B's blocks was prevented, by name."""
    reference, http = tenants.reference, tenants.server.http
    case = reference.telling(0)
    right = {mode: reference.answer(case, mode) for mode in ("block", "full")}
    tenants.store(case, "B", "look")
    store = reference.folder / "served"
    entries = {key: _bytes(store, reference.key(ids, "B")) for key, ids in enumerate(case.blocks)}
    plan = BlockPlan("complete", case.lengths, "B", case.keep)
    found: dict[str, bool] = {}

    def tokens(tenant: str, plan: bool = True) -> list[int]:
        answer = tenants.complete(tenant, case, plan=plan, tokens=TOKENS)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    for name, secret in (("names B's namespace", None), ("forges the code for it", "a guess")):
        fields = plan.to_dict(secret or "x")["blockattn"]
        if secret is None:
            del fields["mac"]
        for path in (COMPLETIONS, "/v1/completions"):
            body = {"prompt": case.ids, "max_tokens": 1}
            body["kv_transfer_params"] = {"blockattn": fields}
            answer = tenants.server.post(path, body, **{"x-tenant-id": "A"})
            found[f"{name} at {path}"] = answer.is_error
    body = {"prompt": case.ids, "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0}
    body |= {"cache_salt": salt(plan, reference.profile), "return_token_ids": True}
    said = tenants.server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    found["asks for B's pages by their salt"] = said == right["full"]
    moved = (case.lengths[0] - 1, case.lengths[1] + 1, *case.lengths[2:])
    tenants.complete("A", Case(case.texts, case.ids, moved))
    for ids in case.blocks:
        tenants.post("A", ENCODE, {"blocks": [ids]})
        tenants.post("A", ENCODE, {"blocks": [ids], "opens_prompt": True})
    found["stores blocks of the same tokens"] = entries == {
        key: _bytes(store, reference.key(ids, "B")) for key, ids in enumerate(case.blocks)
    }
    for tenant in ("B", "A"):
        for mode in ("block", "full"):
            is_right = tokens(tenant, mode == "block") == right[mode]
            found[f"after that, {tenant}'s answer in {mode} mode is right"] = is_right
    http.close()
    return found


def _bytes(store: Path, key: str) -> bytes:
    (path,) = store.rglob(f"*{key}*")
    return path.read_bytes()


def main(
    probes: int = 150,
    output: Annotated[Path | None, typer.Option()] = None,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = Reference(folder)
        options = reference.options(
            store=str(folder / "served"), tenant_secret_env="TENANT_SECRET", recognize=True
        )
        secret = {"TENANT_SECRET": os.urandom(16).hex()}
        server = Server(options, folder / "server.log", environment=ENVIRONMENT | secret)
        try:
            tenants = Tenants(reference, server.wait())
            rows = probed(tenants, probes, lambda n: print(f"\r{n}/{probes}", end="", flush=True))
            stopped = attacks(tenants)
        finally:
            server.close()
    tests = [compared(rows, way, owner) for way in WAYS for owner in ("B", "A")]
    shown = table(tests, stopped)
    print(f"\n{shown}")
    result = {"machine": host(), "probes": probes, "tests": tests, "attacks": stopped}
    write(output, result, shown)
    sys.exit(not (all(stopped.values()) and all(map(is_as_it_should, tests))))


def table(tests: Sequence[Mapping[str, Any]], stopped: Mapping[str, bool]) -> str:
    """The results as a Markdown table."""
    head = (
        "way",
        "passages of",
        "median",
        "of nobody's",
        "faster than nobody's",
        "distinguishable",
    )
    lines = []
    for one in tests:
        low, high = one["faster_within"]
        times = (f"{one[name] * 1e3:.1f} ms" for name in ("median_s", "median_of_nobodys_s"))
        faster = f"{one['faster']:.3f} ({low:.3f} to {high:.3f})"
        apart = "no" if one["says_the_same"] else "yes"
        lines.append((one["way"], one["owner"], *times, faster, apart))
    attacks = ((name, "yes" if is_stopped else "**no**") for name, is_stopped in stopped.items())
    return markdown(head, lines) + "\n" + markdown(("what A does", "is without effect"), attacks)


def is_as_it_should(test: Mapping[str, Any]) -> bool:
    """Whether figures and times distinguish A's own passages from nobody's, but not B's."""
    low, high = test["faster_within"]
    if test["owner"] == "A":
        return bool(low > 0.5 or not test["says_the_same"])
    return bool(low <= 0.5 <= high and test["says_the_same"])


if __name__ == "__main__":
    typer.run(main)
