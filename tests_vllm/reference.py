"""What is right: the answers of this package's own engine, over a store that servers share."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import blockattn_rag
from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.block_kv import BlockKV, store_key, token_digest
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.prompts.blocks import STORED, BlockPrompt, Keep
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.markers import segment, wrap
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.profile import ModelProfile, profile_of
from blockattn_rag.store import DirectoryStore

PACKAGE = Path(blockattn_rag.__file__).parent
MODEL = str(PACKAGE / "model" / "bundled")
SYSTEM = "Answer from the texts.\n"
TOKENS = 24
TELLING = (3, 8, 13, 14, 17, 19, 21)
"""Records from which ``Reference.telling`` makes prompts."""
WRITTEN_S = 30
"""Seconds within which what was encoded must be stored."""


class Case(NamedTuple):
    """A prompt of a system text, passages and a question, as the local engine cuts it.

    Args:
        texts: The system text, the passages and the question.
        marked: The texts in one string, with markers around the passages.
        ids: Token ids of the prompt.
        lengths: Tokens of each context block.
    """

    texts: tuple[str, ...]
    marked: str
    prompt: BlockPrompt
    ids: list[int]
    lengths: tuple[int, ...]

    @property
    def blocks(self) -> list[list[int]]:
        """Token ids of each context block."""
        ends = list(itertools.accumulate(self.lengths))
        return [self.ids[end - n : end] for end, n in zip(ends, self.lengths, strict=True)]

    @property
    def keep(self) -> tuple[Keep, ...]:
        """All blocks may be stored."""
        return (STORED,) * len(self.lengths)

    @property
    def params(self) -> dict[str, Any]:
        """``kv_transfer_params``."""
        return BlockPlan("complete", self.lengths, keep=self.keep).to_dict()

    def body(self, **more: Any) -> dict[str, Any]:
        """Body of a completion: greedy, ``TOKENS`` tokens."""
        return {
            "prompt": self.marked,
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }


class Reference:
    """The local engine, a directory store, and the profile of its model.

    Args:
        name: Folder of the model.
    """

    def __init__(self, folder: Path, name: str = MODEL) -> None:
        self.folder = folder
        self.name = name
        self.store = folder / "kv"
        self.engine = BlockAttentionEngine.from_pretrained(
            name, store=self.store, dtype="float32", device="cpu"
        )
        self.model: BlockModel = self.engine._model
        self.profile: ModelProfile = profile_of(self.model)
        lines = (
            (PACKAGE / "app" / "demo" / "data" / "test-order-5.jsonl")
            .read_text("utf-8")
            .splitlines()
        )
        self._records = [json.loads(line) for line in lines]

    def options(self, **changed: Any) -> dict[str, Any]:
        """The connector's, for the reference's own store."""
        given = {"store": str(self.store), "memory": "64MiB"}
        return given | changed

    def case(self, number: int, records: int = 1, pad: int = 0) -> Case:
        """A question of the bundled data with the passages of so many records.

        Args:
            pad: tokens that are added to its last passage.
        """
        taken = self._records[number : number + records]
        passages = [one["text"].strip() for record in taken for one in record["passages"]]
        passages[-1] += " a" * pad
        return self.case_of((SYSTEM, *passages, f"Question: {taken[0]['question']}\nAnswer:"))

    def case_of(self, texts: tuple[str, ...]) -> Case:
        """A prompt of a system text, passages and a question."""
        system, *passages, question = texts
        marked = system + "".join(map(wrap, passages)) + question
        prompt = segment(marked, BLANK_LINE)
        ids = self.model.tokenizer.prompt_ids(prompt)
        return Case(texts, marked, prompt, ids.flat, tuple(len(block) for block in ids.context))

    def stored(self, case: Case) -> Case:
        """A prompt whose blocks are all stored."""
        store = DirectoryStore(self.store)
        for block in case.blocks:
            if self.key(block) not in store:
                store.put(self.key(block), self.encoded(block))
        return case

    def written(self, ids: list[int]) -> BlockKV:
        """A block that an engine has encoded and whose threads write it, once it is stored."""
        store, until = DirectoryStore(self.store), time.monotonic() + WRITTEN_S
        while (kv := store.get(self.key(ids))) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert kv is not None, f"not stored within {WRITTEN_S} s"
        return kv

    def encoded(self, ids: list[int]) -> BlockKV:
        """A block as the local model computes it."""
        ((kv,),) = self.model.encode([EncodeRequest(ids, token_digest(ids), "")])
        return kv

    def key(self, ids: list[int], namespace: str = "") -> str:
        """Where a block is stored."""
        return store_key(self.profile.fingerprint, token_digest(ids), namespace)

    def telling(self, place: int) -> Case:
        """A prompt, all blocks stored, whose answer tells whether it was computed in block mode and
        whether keys were turned to their places."""
        case = self.case(TELLING[place], records=3)
        right = self.answer(case)
        assert right != self.answer(case, "full")
        assert right != self.answer(case, recipe=Recipe(positions="composite"))
        return self.stored(case)

    def answer(
        self, case: Case, mode: Mode = "block", tokens: int = TOKENS, **options: Any
    ) -> list[int]:
        """Greedy tokens of the local engine, so many: what follows an answer tells more than the
        answer."""
        made = self.engine.generate(
            case.prompt,
            mode=mode,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            temperature=0.0,
            **options,
        )
        return list(made.token_ids)


def assert_close(found: BlockKV, expected: BlockKV) -> None:
    """Compare the keys and values of two blocks."""
    pairs = zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True)
    for one, other in pairs:
        assert float((one - other).abs().max()) < 1e-4 * max(1.0, float(other.abs().max()))
