"""Comparison of block mode with keys and values in the model's dtype and in int8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from rows import Record, divergence
from sets import Item
from tables import markdown

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.lab.evaluation.metrics import bootstrap_mean
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import PromptFormat

TYPES: tuple[KVDtype, ...] = get_args(KVDtype)
"""The rows. Each is compared with the first, the model's dtype."""

_STORE_BYTES = 2 << 30


def engines_of(model: BlockModel, recipe: str) -> dict[str, BlockAttentionEngine]:
    """Return an engine for each type of keys and values. Stores keep passages between questions."""
    return {
        name: BlockAttentionEngine(
            model, MemoryStore(_STORE_BYTES), recipe=recipe, kv_dtype=name, resident_bytes=0
        )
        for name in TYPES
    }


def answers(
    engines: Mapping[str, BlockAttentionEngine],
    form: PromptFormat,
    max_new_tokens: int,
    item: Item,
    rows: Sequence[str],
) -> Iterator[Record]:
    """Answer a question with greedy decoding, with keys and values of different types.

    ``kl`` and ``agreement`` compare a row with the model's dtype, over the latter's greedy answer.
    """
    base = engines[TYPES[0]]
    prompt = form.prompt(item.question, item.passages, base.model.tokenizer.tokenizer)
    base.precompute(prompt.context, as_prompt=True)
    own = base.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)
    expected = base.answer_logits(prompt, own.token_ids).double().log_softmax(-1)
    for name in rows:
        engine = engines[name]
        engine.precompute(prompt.context, as_prompt=True)
        found = own
        if engine is not base:
            found = engine.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)
        scores = divergence(engine.answer_logits(prompt, own.token_ids), expected)
        yield Record.of(item, name, found, scores=scores)


def precision_table(records: Sequence[Record]) -> str:
    """Format the effect of int8 on correct answers, greedy answers and predictions, by set and in
    total."""
    base, small = ({(one.set, one.id): one for one in records if one.row == name} for name in TYPES)
    names = [*dict.fromkeys(one.set for one in small.values())]
    lines = []
    for name in (*names, "all"):
        pairs = [(base[key], one) for key, one in small.items() if name in (key[0], "all")]
        change = bootstrap_mean([new.right - old.right for old, new in pairs])
        kl = bootstrap_mean([new.kl for _, new in pairs])
        count = len(pairs)
        lines.append(
            (
                f"{name}, {count}",
                *(sum(pair[at].right for pair in pairs) for at in (0, 1)),
                "{:+.1%} ({:+.1%} to {:+.1%})".format(*change),
                sum(old.right > new.right for old, new in pairs),
                sum(old.right < new.right for old, new in pairs),
                f"{sum(old.output == new.output for old, new in pairs) / count:.0%}",
                f"{sum(new.agreement for _, new in pairs) / count:.2%}",
                "{:.5f} ({:.5f} to {:.5f})".format(*kl),
            )
        )
    head = ["questions", "right: model's type", "int8", "difference (95 %)", "lost", "gained"]
    head += ["equal answers", "equal tokens", "KL (95 %)"]
    return markdown(head, lines)
