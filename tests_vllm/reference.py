"""Expected answers: those of this package's own engine, with a store that servers share."""

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
"""Records that ``Reference.telling`` creates prompts from."""
WRITTEN_S = 30
"""Seconds within which an encoded block must be stored."""


class Case(NamedTuple):
    """Prompt of a system text, passages and a question, split into blocks by the local engine.

    Args:
        texts: System text, passages and question.
        marked: The texts as one string, with markers around the passages.
        ids: Token ids of the prompt.
        lengths: Number of tokens of each context block.
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
        """Marks all blocks as storable."""
        return (STORED,) * len(self.lengths)

    @property
    def params(self) -> dict[str, Any]:
        """``kv_transfer_params`` of a request."""
        return self.params_of(STORED)

    def params_of(self, keep: Keep) -> dict[str, Any]:
        """Return ``kv_transfer_params`` with the same ``keep`` for all blocks."""
        return BlockPlan("complete", self.lengths, keep=(keep,) * len(self.lengths)).to_dict()

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the body of a completion request for ``TOKENS`` greedy tokens."""
        return {
            "prompt": self.marked,
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }


class Reference:
    """The local engine with a directory store, and the profile of its model.

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
        data = PACKAGE / "app" / "demo" / "data" / "test-order-5.jsonl"
        self._records = [json.loads(line) for line in data.read_text("utf-8").splitlines()]

    def options(self, **changed: Any) -> dict[str, Any]:
        """Return options of a connector that uses the store of the reference."""
        given = {"store": str(self.store), "memory": "64MiB"}
        return given | changed

    def case(self, number: int, records: int = 1, pad: int = 0) -> Case:
        """Return a question of the bundled data with the passages of one or more records.

        Args:
            pad: Number of tokens to add to the last passage.
        """
        taken = self._records[number : number + records]
        passages = [one["text"].strip() for record in taken for one in record["passages"]]
        passages[-1] += " a" * pad
        return self.case_of((SYSTEM, *passages, f"Question: {taken[0]['question']}\nAnswer:"))

    def case_of(self, texts: tuple[str, ...]) -> Case:
        """Return a prompt of a system text, passages and a question."""
        system, *passages, question = texts
        marked = system + "".join(map(wrap, passages)) + question
        prompt = segment(marked, BLANK_LINE)
        ids = self.model.tokenizer.prompt_ids(prompt)
        return Case(texts, marked, prompt, ids.flat, tuple(len(block) for block in ids.context))

    def stored(self, case: Case) -> Case:
        """Store all blocks of a prompt. Returns the prompt."""
        store = DirectoryStore(self.store)
        for block in case.blocks:
            if self.key(block) not in store:
                store.put(self.key(block), self.encoded(block))
        return case

    def written(self, ids: list[int]) -> BlockKV:
        """Wait until a block that an engine has encoded is stored. Returns its KV."""
        store, until = DirectoryStore(self.store), time.monotonic() + WRITTEN_S
        while (kv := store.get(self.key(ids))) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert kv is not None, f"not stored within {WRITTEN_S} s"
        return kv

    def encoded(self, ids: list[int]) -> BlockKV:
        """Encode a block with the local model."""
        ((kv,),) = self.model.encode([EncodeRequest(ids, token_digest(ids), "")])
        return kv

    def key(self, ids: list[int], namespace: str = "") -> str:
        """Return the store key of a block."""
        return store_key(self.profile.fingerprint, token_digest(ids), namespace)

    def telling(self, place: int) -> Case:
        """Return a prompt with stored blocks whose answer depends on whether block mode was used,
        and on whether keys were rotated to their positions."""
        case = self.case(TELLING[place], records=3)
        right = self.answer(case)
        assert right != self.answer(case, "full")
        assert right != self.answer(case, recipe=Recipe(positions="composite"))
        return self.stored(case)

    def answer(
        self, case: Case, mode: Mode = "block", tokens: int = TOKENS, **options: Any
    ) -> list[int]:
        """Return greedy tokens of the local engine. Their number is fixed, because the text after
        the actual answer reveals more differences."""
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        made = self.engine.generate(case.prompt, mode=mode, temperature=0.0, **lengths, **options)
        return list(made.token_ids)


def assert_close(found: BlockKV, expected: BlockKV) -> None:
    """Check that the keys and values of two blocks are close."""
    pairs = zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True)
    for one, other in pairs:
        assert float((one - other).abs().max()) < 1e-4 * max(1.0, float(other.abs().max()))
