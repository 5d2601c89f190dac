"""Check that a server's tenants cannot detect, use or damage each other's blocks.

    python benchmarks/serving_tenants.py --probes 150

vLLM serves the bundled model with a tenant secret. Tenant A sends passages that tenant B stored,
passages that nobody stored, and its own, in random order and through every route. For B's and
nobody's passages, the server must return the same statistics, and its response times must not
differ: the bootstrap interval of the probability that B's passages are answered faster (the area
under the ROC curve) must contain 0.5, at a joint level of 95 % for all routes. A's own passages
show that the test can detect a leak. Then A tries to read and damage B's blocks. The exit status is
1 if a check fails or an attack succeeds.

Run the script in the environment of `make test-vllm`.
"""

from __future__ import annotations

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
from openai_client import Question
from serving_load import ENVIRONMENT, host, write
from tables import markdown

from blockattn_rag import Passage
from blockattn_rag.prompts.blocks import STORED
from blockattn_rag.prompts.tokenization import PromptIds
from blockattn_rag.server.keys import salt
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.protocol import ENCODE, OPENAI, PROTOCOL_VERSION
from blockattn_rag.server.vllm.bodies import ChatBody
from blockattn_rag.server.vllm.openai import Prompts
from tests_vllm.reference import TELLING, TOKENS, Reference
from tests_vllm.server import Server

OWNERS = ("B", "nobody", "A")
PASSAGE_WORDS = 400
"""Number of words per passage. Each is a token, and computing them dominates the response time."""

PASSAGES = 2

_INDEXED_S = 15.0


def auc(scores: np.ndarray, happened: np.ndarray) -> float:
    """Return the area under the ROC curve of scores for an event; ties count half.

    Raises:
        ValueError: The event happened in all trials or in none.
    """
    if happened.all() or not happened.any():
        raise ValueError(
            f"Found {happened.sum()} events in {len(happened)} trials, expected at least one trial "
            "with an event and one without: increase --probes"
        )
    yes, no = scores[happened], scores[~happened]
    above = (yes[:, None] > no).mean()
    return float(above + (yes[:, None] == no).mean() / 2)


def interval(
    scores: np.ndarray, happened: np.ndarray, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Return the bootstrap interval of ``auc``. Raises the same errors."""
    auc(scores, happened)  # Raise an error if no resample could contain both outcomes.
    draw = np.random.default_rng(seed)
    found: list[float] = []
    while len(found) < 2000:
        rows = draw.integers(len(scores), size=len(scores))
        if 0 < happened[rows].sum() < len(rows):
            found.append(auc(scores[rows], happened[rows]))
    low, high = np.quantile(found, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


class Tenants:
    """A server with two tenants, A and B, and a generator of prompts with new passages.

    Args:
        reference: Reference answers of the served model.
        server: Server with a tenant secret.
    """

    def __init__(self, reference: Reference, server: Server) -> None:
        self.reference = reference
        self.server = server
        self._choose = random.Random(0)

    def question(self) -> Question:
        """Return a question with new passages of equal length."""
        words = ["a", "in", "of", "the", "to"]
        passages = []
        for _ in range(PASSAGES):
            text = " ".join(["a", *self._choose.choices(words, k=PASSAGE_WORDS - 1)])
            passages.append(Passage("", text))  # At the start of a text, "the" has two tokens.
        return Question("What?", tuple(passages))

    def store(self, question: Question, owner: str, way: str) -> None:
        """Store the passages of a question for a tenant, and answer it in full mode."""
        if owner == "nobody":
            return
        if way in (documents.__name__, plain_text.__name__):
            self.chat(owner, question.documents)
            return
        self.encode(owner, question.texts)
        self.chat(owner, in_full(question))

    def post(self, tenant: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.server.post(path, body, **{"x-tenant-id": tenant})
        if not answer.is_success:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        body: dict[str, Any] = answer.json()
        return body

    def encode(self, tenant: str, texts: Sequence[str], **more: Any) -> Any:
        """Encode passages, and return the outcome of each. ``more``: Additional body fields."""
        return self.post(tenant, ENCODE, {"texts": [*texts], **more})["passages"]

    def chat(self, tenant: str, body: Mapping[str, Any], tokens: int = 1) -> dict[str, Any]:
        """Send a chat request for ``tokens`` tokens, and return the server's response."""
        body = {**body, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
        return self.post(tenant, f"{OPENAI}/chat/completions", body | {"return_token_ids": True})

    def figures(self, body: Mapping[str, Any]) -> Any:
        """Return the reuse statistics in the answer to a chat of tenant A."""
        answer = self.chat("A", body)
        return [answer["blockattn"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]]


def in_full(question: Question) -> dict[str, Any]:
    """Return the body of a chat in full mode."""
    return {**question.documents, "blockattn": {"mode": "full"}}


def look(tenants: Tenants, question: Question) -> Any:
    """Look up which passages are stored."""
    return tenants.encode("A", question.texts, only_look=True)


def encode(tenants: Tenants, question: Question) -> Any:
    """Store passages."""
    return tenants.encode("A", question.texts)


def documents(tenants: Tenants, question: Question) -> Any:
    """Ask with the passages as documents."""
    return tenants.figures(question.documents)


def parts(tenants: Tenants, question: Question) -> Any:
    """Ask with the passages as content parts."""
    return tenants.figures(question.parts)


def in_full_mode(tenants: Tenants, question: Question) -> Any:
    """Ask in full mode."""
    tenants.chat("A", in_full(question))


def plain_text(tenants: Tenants, question: Question) -> Any:
    """Ask with the passages in plain text, where the server recognizes them."""
    texts = [*(f"<source>{text}</source>" for text in question.texts), question.text]
    return tenants.figures({"messages": [{"role": "user", "content": "\n".join(texts)}]})


WAYS: Mapping[str, Callable[[Tenants, Question], Any]] = {
    one.__name__: one for one in (look, encode, documents, parts, in_full_mode, plain_text)
}


def probed(
    tenants: Tenants, probes: int, on_progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Try each route with the passages of each owner, in random order.

    Returns:
        Statistics from the server, and the response time in seconds, of each trial.
    """
    rows, order = [], random.Random(1)
    pasted = [{owner: tenants.question() for owner in OWNERS} for _ in range(probes + 2)]
    for questions_of in pasted:
        # Store these passages first, because the index is written after a few seconds.
        for owner, question in questions_of.items():
            tenants.store(question, owner, plain_text.__name__)
    time.sleep(_INDEXED_S)
    plain_text(tenants, tenants.question())  # Make the server read the index.
    time.sleep(1)
    for number in range(probes + 2):
        turn = [(way, owner) for way in WAYS for owner in OWNERS]
        questions = {one: tenants.question() for one in turn if one[0] != plain_text.__name__}
        for (way, owner), question in questions.items():
            tenants.store(question, owner, way)
        questions |= {(plain_text.__name__, owner): pasted[number][owner] for owner in OWNERS}
        order.shuffle(turn)
        for way, owner in turn:
            began = time.perf_counter()
            said = WAYS[way](tenants, questions[way, owner])
            seconds = time.perf_counter() - began
            if number >= 2:  # The first trials are a warm-up.
                rows.append({"way": way, "owner": owner, "said": said, "seconds": seconds})
        on_progress(number)
    return rows


def compared(rows: list[dict[str, Any]], way: str, owner: str) -> dict[str, Any]:
    """Compare the trials with an owner's passages with those that nobody stored."""
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


def telling(reference: Reference) -> tuple[Question, dict[str, list[int]]]:
    """Return a question whose answers in block and full mode differ, and the tokens of both."""
    tokenizer = reference.model.tokenizer.tokenizer
    for number in TELLING:
        _, *passages, text = reference.case(number, records=3).texts
        question = Question(text, tuple(Passage("", one) for one in passages))
        prompt = question.documents_prompt(tokenizer)
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "temperature": 0.0}
        right = {
            mode: list(reference.engine.generate(prompt, mode=mode, **options).token_ids)
            for mode in ("block", "full")
        }
        if right["block"] != right["full"]:
            return question, right
    raise RuntimeError("The modes give the same answers to all questions: add records to TELLING.")


def attacks(tenants: Tenants) -> dict[str, bool]:
    """Attack B's blocks as A. Return whether each attack was prevented, by name."""
    reference, server = tenants.reference, tenants.server
    question, right = telling(reference)
    tokenizer = reference.model.tokenizer
    ids = tokenizer.prompt_ids(question.documents_prompt(tokenizer.tokenizer))
    tenants.store(question, "B", "look")
    store = reference.folder / "served"

    def entries() -> list[bytes]:
        """Return the store entries of B's passages."""
        return [_bytes(store, reference.key(one, "B")) for one in ids.context[1:]]

    before = entries()
    found = forged_plans(tenants, question, ids)
    body = ChatBody.from_dict(question.documents)
    prompts = Prompts(tokenizer.tokenizer)
    prompt = prompts.token_ids(prompts.chat(body, (), {}), "block")
    plan = BlockPlan("complete", prompt.lengths, "B", prompt.keep)
    pages = salt(plan, reference.profile)
    completion = {"prompt": ids.flat, "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0}
    completion |= {"cache_salt": pages, "return_token_ids": True}
    said = server.post("/v1/completions", completion).json()["choices"][0]["token_ids"]
    found["asks for B's pages by their salt"] = said == right["full"]
    cut = [part for text in question.texts for part in (text[:20], text[20:])]
    tenants.chat("A", Question(question.text, tuple(Passage("", one) for one in cut)).documents)
    for text in question.texts:
        tenants.encode("A", [text])
    found["stores blocks of the same tokens"] = entries() == before
    for tenant in ("B", "A"):
        for mode, chat in (("block", question.documents), ("full", in_full(question))):
            answer = tenants.chat(tenant, chat, TOKENS)["choices"][0]["token_ids"]
            found[f"after that, {tenant}'s answer in {mode} mode is right"] = answer == right[mode]
    server.http.close()
    return found


def forged_plans(tenants: Tenants, question: Question, ids: PromptIds) -> dict[str, bool]:
    """Return whether the server rejects forged plans with B's namespace, by name."""
    plan = {"v": PROTOCOL_VERSION, "op": "complete", "namespace": "B"}
    plan["lengths"] = [len(block) for block in ids.context]
    plan["keep"] = [[*STORED]] * len(ids.context)
    bodies = {
        "/v1/completions": {"prompt": ids.flat},
        "/v1/chat/completions": question.plain,
        f"{OPENAI}/chat/completions": question.documents,
    }
    found = {}
    for name, more in (("names B's namespace", {}), ("forges its signature", {"mac": "0" * 64})):
        params = {"kv_transfer_params": {"blockattn": plan | more}}
        for path, body in bodies.items():
            body = {**body, **params, "max_tokens": 1}
            answer = tenants.server.post(path, body, **{"x-tenant-id": "A"})
            found[f"{name} at {path}"] = answer.is_error
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
    """Format the results as Markdown tables."""
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
    """Return whether statistics and times reveal A's own passages, but not those of B."""
    low, high = test["faster_within"]
    if test["owner"] == "A":
        return bool(low > 0.5 or not test["says_the_same"])
    return bool(low <= 0.5 <= high and test["says_the_same"])


if __name__ == "__main__":
    typer.run(main)
