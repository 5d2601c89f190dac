"""Segmentation of conversations and long turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.chat_template import render_chat
from blockattn_rag.prompts.segmentation import conversation
from tests.models import CHAT_TEMPLATE, tiny_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TEXTS = st.lists(
    st.sampled_from(["a", "word ", "\n\n", "---", "=====", "\n\t", "\n", " ", "\t", "--"])
).map("".join)

BARE = tiny_tokenizer(bos=False, chat="{% for m in messages %}{{ m.content }}{% endfor %}")


class TestConversation:
    def test_system_user_and_assistant_turns_are_blocks_and_the_last_turn_is_final(self) -> None:
        prompt = conversation(CHAT, tiny_tokenizer())
        assert [block.rendered for block in prompt.context] == [
            "<|begin|><|system|>\nBe brief.<|end|>\n",
            "<|user|>\nHi<|end|>\n",
            "<|assistant|>\nHello<|end|>\n",
        ]
        assert prompt.final == "<|user|>\nBye<|end|>\n<|assistant|>\n"
        assert prompt.text == render_chat(tiny_tokenizer(), CHAT)

    def test_control_tokens_inside_a_turn_stay_text(self) -> None:
        messages = [{"role": "user", "content": "<|end|>"}, *CHAT[2:]]
        block = conversation(messages, tiny_tokenizer()).context[0]
        assert block.spans == (Span("<|end|>", "conversation"),)

    def test_templates_that_refuse_a_single_system_message_are_supported(self) -> None:
        tokenizer = tiny_tokenizer(
            chat="{% if messages|length == 1 and messages[0].role == 'system' %}"
            "{{ raise_exception('no user') }}{% endif %}" + CHAT_TEMPLATE
        )
        prompt = conversation(CHAT, tokenizer)
        assert prompt.context[0].rendered == "<|begin|><|system|>\nBe brief."
        assert prompt.text == render_chat(tokenizer, CHAT)

    def test_a_template_without_a_system_role_puts_the_system_text_first(self) -> None:
        tokenizer = tiny_tokenizer(
            chat="{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}"
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
            ("x", [{**CHAT[1], "name": "<|end|>"}], "Found a message with 'name'"),
        ],
    )
    def test_invalid_messages_are_refused(
        self, template: str | None, messages: Any, expected: str
    ) -> None:
        with pytest.raises(SegmentationError, match=expected):
            conversation(messages, tiny_tokenizer(chat=template))


class TestCutTurns:
    def pieces(self, text: str, limit: int) -> list[str]:
        prompt = conversation([{"role": "user", "content": text}], BARE, blocks_per_turn=limit)
        return [*(block.text for block in prompt.context), prompt.final]

    @given(TEXTS, st.integers(1, 5))
    def test_pieces_join_to_the_text_and_none_is_blank(self, text: str, limit: int) -> None:
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
    def test_texts_are_cut_at_the_coarsest_separator(self, text: str, pieces: list[str]) -> None:
        assert self.pieces(text, 15) == pieces

    def test_superfluous_cuts_are_dropped_to_balance_pieces(self) -> None:
        assert self.pieces("a\nb\nc\nd\nlongest", 2) == ["a\nb\nc\nd\n", "longest"]

    def test_a_long_text_is_cut_in_about_linear_time(self) -> None:
        """Quadratic time would exceed the timeout of pytest."""
        assert len(self.pieces("line\n" * 100_000 + " " * 100_000 + "end", 15)) == 15

    def test_a_limit_below_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected 1 or more"):
            self.pieces("a", 0)
