"""Training data: three kinds of records, the same token ids as in the engine, invalid lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.lab.training.data import (
    DataReport,
    EncodedSample,
    SampleEncoder,
    read_training_samples,
)
from blockattn_rag.prompts.formats import FORMATS, Passage
from blockattn_rag.prompts.segmentation import conversation
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import tiny_tokenizer

MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"},
    ]
}  # fmt: skip
BLOCKS: dict[str, Any] = {"blocks": ["a is 1. ", "b is 2. "], "prompt": "b is", "response": " 2"}
PASSAGES: dict[str, Any] = {
    "question": "Where?",
    "passages": [{"title": "T", "text": "here"}, {"text": "there"}],
    "answer": "Here",
}
RECORDS = {"messages": MESSAGES, "blocks": BLOCKS, "passages": PASSAGES}


def texts(sample: EncodedSample) -> list[str]:
    """Decode each block."""
    tokenizer, start, found = tiny_tokenizer(), 0, []
    for length in sample.block_lengths:
        found.append(str(tokenizer.decode(sample.input_ids[start : start + length])))
        start += length
    return found


def learned(sample: EncodedSample) -> str:
    return str(tiny_tokenizer().decode([i for i in sample.labels if i != -100]))


class TestKinds:
    def test_each_turn_of_messages_is_a_block_and_the_last_answer_is_learned(self) -> None:
        sample = SampleEncoder(tiny_tokenizer()).encode_record(MESSAGES)
        assert texts(sample) == [
            "<|begin|><|system|>\nBe brief.<|end|>\n",
            "<|user|>\nHi<|end|>\n",
            "<|assistant|>\nHello<|end|>\n",
            "<|user|>\nBye<|end|>\n<|assistant|>\nSo long<|end|>",
        ]
        assert learned(sample) == "So long<|end|>"

    def test_blocks_are_taken_literally_and_the_response_ends(self) -> None:
        sample = SampleEncoder(tiny_tokenizer()).encode_record(BLOCKS)
        assert texts(sample) == ["<|begin|>a is 1. ", "b is 2. ", "b is 2<|end|>"]
        assert learned(sample) == " 2<|end|>"

    def test_a_block_may_have_a_template_and_control_tokens(self) -> None:
        blocks = [
            {"text": "<|user|>", "control": True},
            {"text": "<|end|>", "before": "<|doc_start|>", "after": "<|doc_end|>"},
        ]
        tokenizer = tiny_tokenizer()
        sample = SampleEncoder(tokenizer).encode_record({**BLOCKS, "blocks": blocks})
        control = ("<|user|>", "<|doc_start|>", "<|doc_end|>")
        user, start, stop = map(tokenizer.convert_tokens_to_ids, control)
        assert sample.block_lengths[:2] == [2, 2 + len("<|end|>")]
        assert [sample.input_ids[i] for i in (1, 2, 10)] == [user, start, stop]

    def test_passages_are_written_by_the_prompt_format(self) -> None:
        sample = SampleEncoder(tiny_tokenizer(), prompt="turborag").encode_record(PASSAGES)
        assert texts(sample)[1:-1] == [
            "<|doc_start|>T\nhere<|doc_end|>",
            "<|doc_start|>there<|doc_end|>",
        ]
        assert texts(sample)[-1].endswith("Question: Where?<|end|>\n<|assistant|>\nHere<|end|>")

    def test_every_answer_of_several_turns_is_learned_in_the_final_block(self) -> None:
        turns = [{"question": "Q1", "answer": "A1"}, {"question": "Q2", "answer": "A2"}]
        record = {"passages": PASSAGES["passages"], "turns": turns}
        sample = SampleEncoder(tiny_tokenizer()).encode_record(record)
        assert texts(sample)[-1].endswith(
            "<|assistant|>\nA1<|end|>\n<|user|>\nQ2<|end|>\n<|assistant|>\nA2<|end|>"
        )
        assert learned(sample) == "A1<|end|>A2<|end|>"

    def test_literal_turns_are_concatenated_unchanged(self) -> None:
        turns = [{"prompt": "b is", "response": " 2"}, {"prompt": "a is", "response": " 1"}]
        sample = SampleEncoder(tiny_tokenizer()).encode_record({"blocks": ["x"], "turns": turns})
        assert texts(sample)[-1] == "b is 2<|end|>a is 1<|end|>"

    def test_control_tokens_in_an_answer_stay_text(self) -> None:
        sample = SampleEncoder(tiny_tokenizer()).encode_record({**BLOCKS, "response": "<|end|>"})
        answer = [label for label in sample.labels if label != -100]
        assert len(answer) == len("<|end|>") + 1
        assert answer.count(tiny_tokenizer().eos_token_id) == 1


class TestSameTokensAsInference:
    """Prompts have the same tokens in the engine as before the answer in training."""

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("bos", [True, False])
    @pytest.mark.parametrize("chat", [True, False])
    def test_passages_have_the_same_tokens(self, name: str, bos: bool, chat: bool) -> None:
        tokenizer = tiny_tokenizer(bos=bos, chat=chat)
        passages = [Passage("T", "here"), Passage("", "there")]
        prompt = FORMATS[name].prompt("Where?", passages, tokenizer)
        check_prefix(SampleEncoder(tokenizer, prompt=name), PASSAGES, prompt)

    def test_messages_have_the_same_tokens(self) -> None:
        tokenizer = tiny_tokenizer()
        prompt = conversation(MESSAGES["messages"][:-1], tokenizer)
        check_prefix(SampleEncoder(tokenizer), MESSAGES, prompt)


def check_prefix(encoder: SampleEncoder, record: Any, prompt: Any) -> None:
    ids = BlockTokenizer(encoder.hf_tokenizer).prompt_ids(prompt)
    sample = encoder.encode_record(record)
    assert sample.input_ids[: len(ids.flat)] == ids.flat
    assert sample.block_lengths[:-1] == [len(block) for block in ids.context]
    first_learned = next(i for i, label in enumerate(sample.labels) if label != -100)
    assert first_learned == len(ids.flat)


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b'{"messages": [', "Invalid JSON"),
    "no known key": (b'{"text": "a"}', "Found keys 'text', expected 'messages'"),
    "missing response": (b'{"blocks": ["a"], "prompt": "b"}', "Missing key 'response'"),
    "empty block": (b'{"blocks": ["a", " "], "prompt": "b", "response": "c"}', "empty 'blocks[1]"),
    "empty turns": (b'{"blocks": ["a"], "turns": []}', "empty list 'turns'"),
    "wrong type of blocks": (b'{"blocks": "a", "prompt": "b", "response": "c"}', "a string"),
    "unknown key of a block": (
        b'{"blocks": [{"txt": "a"}], "prompt": "b", "response": "c"}',
        "blocks[0] with keys 'txt'",
    ),
    "wrong type of control": (
        b'{"blocks": [{"text": "a", "control": 1}], "prompt": "b", "response": "c"}',
        "true or false",
    ),
    "last message not the assistant's": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
        "Missing response",
    ),
    "two answers at the end": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
        b'{"role": "assistant", "content": "c"}]}',
        "The last two messages both have the role 'assistant'",
    ),
    "tool calls": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", '
        b'"tool_calls": [{}]}]}',
        "messages[1].tool_calls",
    ),
    "too long": (
        b'{"blocks": ["' + b"a" * 900 + b'"], "prompt": "b", "response": "c"}',
        "tokens, expected at most 800",
    ),
}


class TestBadData:
    @pytest.mark.parametrize("name", BAD_LINES)
    def test_bad_line_names_file_line_and_expectation(self, name: str, tmp_path: Path) -> None:
        line, expected = BAD_LINES[name]
        file = tmp_path / "data.jsonl"
        file.write_bytes(json.dumps(BLOCKS).encode() + b"\n\n" + line + b"\n")
        encoder = SampleEncoder(tiny_tokenizer(), max_tokens=800)
        with pytest.raises(DataError) as caught:
            list(read_training_samples([file], encoder))
        assert f"{file}, line 3: " in str(caught.value)
        assert expected in str(caught.value)

    def test_samples_and_tokens_are_counted(self, tmp_path: Path) -> None:
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS.values()))
        found = list(read_training_samples([file], SampleEncoder(tiny_tokenizer())))
        report = DataReport.of(sample.block_lengths for sample in found)
        assert report.samples == len(found) == len(RECORDS)
        assert report.tokens == sum(len(sample.input_ids) for sample in found)

    def test_conversation_refused_by_template_is_a_bad_line(self, tmp_path: Path) -> None:
        tokenizer = tiny_tokenizer()
        refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('ask first') }}{% endif %}"
        tokenizer.chat_template = refusal + str(tokenizer.chat_template)
        refused = {"messages": [{"role": "assistant", "content": "Hello."}, *MESSAGES["messages"]]}
        asked = {"messages": [m for m in MESSAGES["messages"] if m["role"] != "system"]}
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in (asked, refused)))
        with pytest.raises(DataError, match="line 2: The chat template rejects"):
            list(read_training_samples([file], SampleEncoder(tokenizer)))

    def test_messages_without_a_chat_template_are_reported(self) -> None:
        with pytest.raises(DataError, match="no chat template"):
            SampleEncoder(tiny_tokenizer(chat=False)).encode_record(MESSAGES)


def test_compressed_files_and_line_separators_are_read(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl.gz"
    record = {**BLOCKS, "prompt": "a\u2028b\x85c"}
    file.write_bytes(gzip.compress(json.dumps(record, ensure_ascii=False).encode() + b"\r\n"))
    (sample,) = read_training_samples([file], SampleEncoder(tiny_tokenizer()))
    assert texts(sample)[-1] == "a\u2028b\x85c 2<|end|>"
