from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from llama_index.core import PromptHelper, Settings
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    ResponseMode,
    get_response_synthesizer,
)
from llama_index.core.schema import NodeWithScore

from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockPromptHelper,
    block_response_synthesizer,
    canonical_text,
)
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.prompts.formats import BLANK_LINE
from tests.llama_index.conftest import Call, RecordingEngine, encoded, passages

WINDOW = 2200
QUESTION = "What is w1x3?"
READING = [
    "refine", "compact", "tree_summarize", "simple_summarize", "accumulate", "compact_accumulate",
]  # fmt: skip
WAYS = ("sync", "async", "stream", "astream")
FITS, OVERFLOWS = 80, 380
NEW_TOKENS = 3
Make = Callable[[bool], BaseSynthesizer]


def own_helper(llm: BlockAttentionLLM) -> PromptHelper:
    return BlockPromptHelper.from_llm(llm)


def default_helper(llm: BlockAttentionLLM) -> PromptHelper:
    """Return LlamaIndex's helper, which may cut blocks. It counts bytes, like the tokenizer."""
    return PromptHelper(WINDOW, NEW_TOKENS, tokenizer=lambda text: list(text.encode()))


@pytest.fixture
def strings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of all prompts before they are split into blocks."""
    seen: list[str] = []
    original = BlockPrompt.from_spans

    def spy(spans: Iterable[Span], *args: Any) -> BlockPrompt:
        spans = list(spans)
        seen.append("".join(span.text for span in spans))
        return original(spans, *args)

    monkeypatch.setattr(BlockPrompt, "from_spans", spy)
    return seen


async def ask(way: str, make: Make, nodes: list[NodeWithScore]) -> str:
    """Return the answer of a query, an async query, a stream or an async stream."""
    if way == "sync":
        return str(make(False).synthesize(QUESTION, nodes))
    if way == "async":
        return str(await make(False).asynthesize(QUESTION, nodes))
    if way == "stream":
        response: Any = make(True).synthesize(QUESTION, nodes)
        return "".join(response.response_gen)
    response = await make(True).asynthesize(QUESTION, nodes)
    return "".join([text async for text in response.async_response_gen()])


def by_hand(string: str, texts: list[str]) -> list[str]:
    """Split a prompt into block texts by searching for the passages instead of markers."""
    blocks: list[str] = []
    position = 0
    while found := [(at, t) for t in texts if (at := string.find(t, position)) >= 0]:
        at, text = min(found)
        if string[position:at].strip():
            blocks.append(string[position:at])
        blocks.append(text)
        position = at + len(text)
    return [*blocks, string[position:]]


def texts_of(prompt: BlockPrompt) -> list[str]:
    return [*(block.text for block in prompt.context), prompt.final]


# Four of eight combinations, which cover every pair of helper, size and kind of prompt.
@pytest.mark.parametrize(
    ("helper", "count", "size", "chat"),
    [
        (own_helper, 3, FITS, True),
        (own_helper, 5, OVERFLOWS, False),
        (default_helper, 3, FITS, False),
        (default_helper, 5, OVERFLOWS, True),
    ],
    ids=["own-fits-chat", "own-overflows-completion", "fits-completion", "overflows-chat"],
)
@pytest.mark.parametrize("mode", READING)
async def test_passages_are_complete_blocks_or_are_computed(
    mode: str,
    chat: bool,
    count: int,
    size: int,
    helper: Callable[[BlockAttentionLLM], PromptHelper],
    block_model: BlockModel,
    engine: RecordingEngine,
    tokenized: list[str],
    strings: list[str],
) -> None:
    llm = BlockAttentionLLM(
        engine=engine, context_window=WINDOW, max_new_tokens=NEW_TOKENS, is_chat_model=chat
    )
    nodes = encoded(llm, passages(count, size))
    texts = [canonical_text(n.node) for n in nodes]

    def make(streaming: bool) -> BaseSynthesizer:
        return get_response_synthesizer(
            llm, prompt_helper=helper(llm), response_mode=ResponseMode(mode), streaming=streaming
        )

    asked: dict[str, list[Call]] = {}
    answers = set()
    for way in WAYS[: 2 if "accumulate" in mode else 4]:  # accumulate modes cannot stream
        engine.calls.clear()
        answers.add(await ask(way, make, nodes))
        asked[way] = sorted(engine.calls, key=lambda call: call.prompt.text)
    assert len(answers) == 1

    # All methods send the same prompts, with the blocks that a search of the plain text gives.
    calls = asked["sync"]
    prompts = [call.prompt for call in calls]
    assert all([call.prompt for call in of_way] == prompts for of_way in asked.values())
    own = helper is own_helper
    if own or (size == FITS and mode != "simple_summarize"):
        found = [by_hand(string, texts) for string in strings]
        assert all(texts_of(prompt) in found for prompt in prompts)
        for prompt in prompts:
            passages_in = [block for block in prompt.context if block.text in texts]
            assert passages_in == [Block(block.text, BLANK_LINE) for block in passages_in]
    kept = {b.text for p in prompts for b in p.context if b.is_passage}
    if own:
        assert kept == set(texts) or (mode == "simple_summarize" and kept < set(texts) and kept)

    # Complete passages are hits, everything else is computed, and answers do not change.
    fresh = RecordingEngine(block_model)
    for call in calls:
        stats = call.answer.stats
        assert stats.hits >= sum(block.text in texts for block in call.prompt.context)
        assert stats.hits + stats.misses == len(call.prompt.context)
        assert stats.prompt_tokens + NEW_TOKENS <= WINDOW or not own
        assert fresh.generate(call.prompt, max_new_tokens=NEW_TOKENS).text == call.answer.text
    assert tokenized
    assert not [text for text in tokenized if "kvblock" in text]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("mode", ["generation", "no_text", "context_only"])
async def test_modes_without_context_need_no_default_llm(
    mode: str, chat: bool, engine: RecordingEngine, tokenized: list[str]
) -> None:
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=4, is_chat_model=chat)
    nodes = encoded(llm, passages())

    def make(streaming: bool) -> BaseSynthesizer:
        return block_response_synthesizer(llm, mode, streaming=streaming)

    ways = WAYS if mode == "generation" else WAYS[:2]
    [answer] = {await ask(way, make, nodes) for way in ways}
    if mode == "context_only":
        assert answer == "\n\n".join(canonical_text(n.node) for n in nodes)
    elif mode == "generation":
        assert [call.prompt.context for call in engine.calls] == [()] * 4
    else:
        assert answer in ("", "None")
    assert not [text for text in tokenized if "kvblock" in text]


def test_one_prompt_helper_supports_llms_with_different_windows(engine: RecordingEngine) -> None:
    small, large = (
        BlockAttentionLLM(engine=engine, context_window=window, max_new_tokens=4)
        for window in (2000, 6000)
    )
    Settings.prompt_helper = BlockPromptHelper.from_llm(small)
    nodes = encoded(small, passages(4, 700))
    for llm, calls in ((small, range(3, 9)), (large, range(1, 2))):
        engine.calls.clear()
        get_response_synthesizer(llm, response_mode=ResponseMode.TREE_SUMMARIZE).synthesize(
            QUESTION, nodes
        )
        assert len(engine.calls) in calls
        used = [sum(len(b.rendered) for b in c.prompt.context) for c in engine.calls]
        assert max(used) <= llm.metadata.context_window - 4


@pytest.mark.parametrize("mode", READING)
def test_splits_large_passages(mode: str, engine: RecordingEngine, tokenized: list[str]) -> None:
    llm = BlockAttentionLLM(engine=engine, context_window=2200, max_new_tokens=4)
    nodes = encoded(llm, passages(1, 3000))
    block_response_synthesizer(llm, mode).synthesize(QUESTION, nodes)
    assert all(c.answer.stats.prompt_tokens + 4 <= 2200 for c in engine.calls)
    pieces = [b.text for c in engine.calls for b in c.prompt.context if b.is_passage]
    assert pieces
    assert all(piece in canonical_text(nodes[0].node) for piece in pieces)
    assert not [text for text in tokenized if "kvblock" in text]


def test_a_window_without_room_for_passages_is_refused_with_advice(engine: RecordingEngine) -> None:
    llm = BlockAttentionLLM(engine=engine, context_window=900, max_new_tokens=4)
    with pytest.raises(ValueError, match="larger context_window"):
        block_response_synthesizer(llm, "compact").synthesize(QUESTION, encoded(llm, passages()))


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
def test_parts_of_cut_passages_are_blocks(mode: str, chat: bool, engine: RecordingEngine) -> None:
    llm = BlockAttentionLLM(
        engine=engine, context_window=WINDOW, max_new_tokens=NEW_TOKENS, is_chat_model=chat
    )
    nodes = encoded(llm, passages(3, OVERFLOWS))
    synthesizer = get_response_synthesizer(
        llm, prompt_helper=default_helper(llm), response_mode=ResponseMode(mode)
    )
    engine.calls.clear()
    synthesizer.synthesize(QUESTION, nodes)
    words = {word for n in nodes for word in canonical_text(n.node).split()}
    for call in engine.calls:
        # All parts of passages are in blocks, and none is in the final text with the question.
        beside = {word for word in call.prompt.final.split() if word in words and "x" in word}
        assert not beside
