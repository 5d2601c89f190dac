"""Segmentation beyond passages: conversations, texts, examples, JSON state."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.chat_template import render_chat
from blockattn_rag.prompts.segmentation import conversation, few_shot, split_json
from tests.models import tiny_model, tiny_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TEXTS = st.lists(
    st.sampled_from(["a", "word ", "\n\n", "---", "=====", "\n\t", "\n", " ", "\t", "--"])
).map("".join)

BARE = tiny_tokenizer(bos=False)
BARE.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"


class TestConversation:
    def test_turns_joined_are_what_the_chat_template_writes(self) -> None:
        tokenizer = tiny_tokenizer()
        assert conversation(CHAT, tokenizer).text == render_chat(tokenizer, CHAT)

    def test_system_user_and_assistant_turns_are_blocks_and_the_last_turn_is_final(self) -> None:
        prompt = conversation(CHAT, tiny_tokenizer())
        assert [block.rendered for block in prompt.context] == [
            "<|begin|><|system|>\nBe brief.<|end|>\n",
            "<|user|>\nHi<|end|>\n",
            "<|assistant|>\nHello<|end|>\n",
        ]
        assert prompt.final == "<|user|>\nBye<|end|>\n<|assistant|>\n"

    def test_fields_that_could_not_be_told_from_the_template_are_refused(self) -> None:
        messages = [{**CHAT[1], "name": "<|end|>"}, *CHAT[2:]]
        with pytest.raises(SegmentationError, match="Found a message with 'name'"):
            conversation(messages, tiny_tokenizer())

    def test_control_tokens_inside_a_turn_stay_text(self) -> None:
        messages = [{"role": "user", "content": "<|end|>"}, *CHAT[2:]]
        block = conversation(messages, tiny_tokenizer()).context[0]
        assert block.spans == (Span("<|end|>", "conversation"),)

    def test_a_template_that_refuses_a_lone_system_message_is_cut_elsewhere(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = (
            "{% if messages|length == 1 and messages[0].role == 'system' %}"
            "{{ raise_exception('no user') }}{% endif %}" + str(tokenizer.chat_template)
        )
        prompt = conversation(CHAT, tokenizer)
        assert prompt.context[0].rendered == "<|begin|><|system|>\nBe brief."
        assert prompt.text == render_chat(tokenizer, CHAT)

    def test_a_template_without_a_system_role_puts_the_system_text_first(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
            "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        )
        assert conversation(CHAT[:2], tokenizer).text == "[user]Be brief.\n\nHi"

    @pytest.mark.parametrize(
        ("template", "messages", "expected"),
        [
            (None, CHAT, "has no chat template"),
            ("{{ messages[0].content }}", CHAT, "drops, repeats or reorders"),
            ("{% for m in messages|reverse %}{{ m.content }}{% endfor %}", CHAT, "reorders"),
            ("x", [], "Found no message"),
        ],
    )
    def test_refuses_other_input(self, template: str | None, messages: Any, expected: str) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        with pytest.raises(SegmentationError, match=expected):
            conversation(messages, tokenizer)


class TestCutTurns:
    def pieces(self, text: str, limit: int) -> list[str]:
        prompt = conversation([{"role": "user", "content": text}], BARE, blocks_per_turn=limit)
        return [*(block.text for block in prompt.context), prompt.final]

    @given(TEXTS, st.integers(1, 5))
    def test_pieces_joined_are_the_text_and_none_is_blank(self, text: str, limit: int) -> None:
        pieces = self.pieces(f"<{text}>", limit)
        assert "".join(pieces) == f"<{text}>"
        assert all(piece.strip() for piece in pieces)
        assert len(pieces) <= limit

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("a\n\nb---c\nd", ["a\n\n", "b---c\nd"]),
            ("a ---- b===c", ["a ---- ", "b===c"]),
            ("a=== b\n\tc", ["a=== ", "b\n\tc"]),
            ("a\n\tb\nc", ["a\n\t", "b\nc"]),
            ("a\n b\nc", ["a\n ", "b\n", "c"]),
            ("a\r\nb\r\n\r\nc\r\nd", ["a\r\nb\r\n\r\n", "c\r\nd"]),
            ("a\nb\n \t\nc\nd", ["a\nb\n \t\n", "c\nd"]),
            ("one line", ["one line"]),
        ],
    )
    def test_coarsest_separator_cuts(self, text: str, pieces: list[str]) -> None:
        assert self.pieces(text, 15) == pieces

    def test_of_too_many_cuts_those_nearest_to_equal_pieces_are_kept(self) -> None:
        assert self.pieces("a\nb\nc\nd\nlongest", 2) == ["a\nb\nc\nd\n", "longest"]

    def test_a_long_text_is_cut_in_about_linear_time(self) -> None:
        """Quadratic time would exceed pytest's time limit."""
        assert len(self.pieces("line\n" * 100_000 + " " * 100_000 + "end", 15)) == 15

    def test_a_limit_below_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1, found 0"):
            self.pieces("a", 0)


def test_k_examples_are_k_plus_1_blocks() -> None:
    prompt = few_shot(["Q: 1\nA: 2", "Q: 2\nA: 3"], "Q: 3\nA:")
    assert prompt.text == "Q: 1\nA: 2\n\nQ: 2\nA: 3\n\nQ: 3\nA:"
    assert len(prompt.context) == 2


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3))
STATES = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
        ),
        max_leaves=6,
    ),
    min_size=1,
    max_size=3,
)


ODD = st.text('a.[]="\n0', max_size=3)
ODD_STATES = st.recursive(
    st.just(1),
    lambda inner: st.one_of(
        st.dictionaries(ODD, inner, max_size=3),
        st.lists(
            (ODD | st.integers(0, 2)).map(lambda i: {"id": i, "x": {"y": 1}}) | inner, max_size=4
        ),
    ),
    max_leaves=8,
)


def scalar_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in scalar_paths(v, (*path, k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in scalar_paths(v, (*path, i))]
    return [path]


class TestSplitJson:
    def test_plain_fields_share_a_line_and_inner_objects_have_their_own(self) -> None:
        state = {
            "tick": 7,
            "units": [{"id": 3, "hp": 20}, {"id": 8, "hp": 35, "at": [1, 2]}],
            "map": {"name": "desert", "water": {"x": 1}},
        }
        assert split_json(state) == [
            'state: {"tick": 7}\n',
            'state.units[id=3]: {"id": 3, "hp": 20}\n',
            'state.units[id=8]: {"id": 8, "hp": 35, "at": [1, 2]}\n',
            'state.map: {"name": "desert"}\n',
            'state.map.water: {"x": 1}\n',
        ]

    @given(STATES, st.data())
    def test_changed_field_is_one_line(self, state: dict[str, Any], data: st.DataObject) -> None:
        paths = scalar_paths(state)
        if not paths:
            return
        path = data.draw(st.sampled_from(paths))
        changed = copy.deepcopy(state)
        parent: Any = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = "changed beyond doubt"
        before, after = split_json(state), split_json(changed)
        assert len(before) == len(after)
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1

    @given(STATES)
    def test_no_field_is_lost(self, state: dict[str, Any]) -> None:
        marked = copy.deepcopy(state)
        names = []
        for number, path in enumerate(scalar_paths(state)):
            parent: Any = marked
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = f"<{number}>"
            names.append(f"<{number}>")
        text = "".join(split_json(marked))
        assert all(text.count(name) == 1 for name in names)

    def test_items_with_an_id_may_move_without_changing_the_lines_of_others(self) -> None:
        units = [{"id": i, "hp": 10} for i in range(4)]
        lines = split_json({"units": units})
        assert split_json({"units": [units[3], units[1]]}) == [lines[3], lines[1]]

    @given(ODD_STATES)
    def test_no_two_lines_have_one_path_whatever_keys_and_ids_are(self, state: Any) -> None:
        paths = [line.partition(": ")[0] for line in split_json(state)]
        assert len(set(paths)) == len(paths)
        assert all(line.count("\n") == 1 for line in split_json(state))

    def test_ids_and_keys_that_are_no_identifiers_are_quoted(self) -> None:
        items: list[Any] = [{"id": i, "at": {}} for i in (3, "3", "unit-3", "a]\nb", 3, True, None)]
        assert [line.partition(":")[0] for line in split_json({"a.b": items})] == [
            'state["a.b"][id=3]', 'state["a.b"][id="3"]', 'state["a.b"][id="unit-3"]',
            'state["a.b"][id="a]\\nb"]', 'state["a.b"][4]', 'state["a.b"][5]', 'state["a.b"][6]',
        ]  # fmt: skip

    @pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, {1: 2}, [{None: 1}], (1,)])
    def test_what_is_not_json_is_refused(self, value: Any) -> None:
        with pytest.raises(SegmentationError, match="Expected a state that is JSON"):
            split_json({"a": value})

    def test_a_state_that_holds_itself_is_refused(self) -> None:
        state: dict[str, Any] = {}
        state["me"] = [state]
        with pytest.raises(SegmentationError, match="Circular reference"):
            split_json(state)


def test_one_changed_field_among_300_computes_one_block() -> None:
    engines = [
        BlockAttentionEngine.from_pretrained(
            tiny_model("llama", num_hidden_layers=2, max_position_embeddings=32768),
            tokenizer=tiny_tokenizer(),
        )
        for _ in range(2)
    ]
    state = {"units": [{"id": i, "hp": 9} for i in range(300)]}
    question = "Which unit was hit?"
    engines[0].generate([*split_json(state), question], max_new_tokens=1)
    state["units"][150]["hp"] = 8
    prompt = [*split_json(state), question]
    changed, afresh = (engine.generate(prompt, max_new_tokens=4) for engine in engines)
    assert (changed.stats.misses, changed.stats.hits) == (1, 299)
    assert (afresh.stats.misses, afresh.stats.hits) == (300, 0)
    assert changed.token_ids == afresh.token_ids
