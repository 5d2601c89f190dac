"""Small tokenizers with the control tokens, flags and normalizers of real model families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests import chat_templates as templates

_SENTENCES = [
    "The tower stands at the edge of the lake, and the lake is deep and cold.",
    "What is the height of the tower? Answer the question using the context below.",
    "Context information is below. Given the context information, answer the query.",
    "You are a helpful assistant. The user asks; the system prompt says what to do.",
    "system user assistant model tool title: page_label: file_name: import return def <s> </s>",
    'Numbers like 20240101, 3.14 and 42, quotes "so", lists [1, 2], and {"name": "value"}.',
]
_SPLIT_LLAMA3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def in_json(text: str) -> str:
    """Escape a text for use in a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class Family:
    """Tokenizer of a family, and how its chat template treats contents.

    Args:
        tools: Whether the template supports tool calls and results.
        json_results: Whether it writes the results of tools as JSON.
        hides_thinking: Whether it omits text before ``</think>`` in earlier answers.
        swallows_blanks: Whether control tokens remove adjacent white space.
    """

    name: str
    tokenizer: PreTrainedTokenizerFast
    tools: bool = False
    json_results: bool = False
    hides_thinking: bool = False
    swallows_blanks: bool = False

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """Text of every control token."""
        return tuple(sorted(self.tokenizer.get_added_vocab()))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of control tokens: added tokens, and vocabulary entries with the same string."""
        vocabulary = self.tokenizer.get_vocab()
        return frozenset(vocabulary[token] for token in self.controls)

    def controls_in(self, ids: list[int]) -> list[str]:
        """Return the control tokens in ``ids``, in order."""
        return [str(self.tokenizer.convert_ids_to_tokens(i)) for i in ids if i in self.control_ids]

    def parsed(self, text: str) -> list[int]:
        """Tokenize a text as transformers does, recognizing every control token."""
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=False)
        return list(encoded["input_ids"])

    def decoded(self, ids: list[int]) -> str:
        """Decode ids, including control tokens."""
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))

    def typed(self, history: Sequence[str]) -> list[str]:
        """Return the texts of a history, user first, that must reach the model."""
        return [
            text.rpartition("</think>")[2] if i % 2 and self.hides_thinking else text
            for i, text in enumerate(history)
        ]

    def results(self, texts: Sequence[str]) -> list[str]:
        """Return tool results in the format of the template."""
        return [in_json(text) if self.json_results else text for text in texts]

    def as_decoded(self, text: str) -> str:
        """Return a text as it is decoded from its ids, that is, normalized by the tokenizer."""
        text = text.encode("utf-8", "replace").decode()
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        text = normalizer.normalize_str(text) if normalizer is not None else text
        return text.replace("▁", " ") if self.name == "mistral" else text


def _byte_level(normalizer: Any = None, *, split: Regex | None = None) -> Tokenizer:
    """Byte-level BPE tokenizer, trained on a few sentences."""
    backend = Tokenizer(models.BPE(ignore_merges=split is not None))
    if normalizer is not None:
        backend.normalizer = normalizer
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(split, "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    backend.train_from_iterator(_SENTENCES, trainer)
    return backend


def _unigram(pieces: list[str]) -> Tokenizer:
    """Unigram tokenizer with byte fallback. ``pieces`` are control tokens in its vocabulary."""
    words = sorted({word for line in _SENTENCES for word in line.split() if word.isalpha()})
    characters = ["▁", "\n", "\t", *(chr(code) for code in range(33, 127))]
    vocabulary = [("<unk>", 0.0), *((piece, 0.0) for piece in pieces)]
    vocabulary += [(f"<0x{byte:02X}>", -100.0) for byte in range(256)]
    vocabulary += [(f"▁{word}", -8.0) for word in words]
    vocabulary += [(character, -9.0) for character in characters]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _family(
    name: str,
    backend: Tokenizer,
    template: str,
    control: tuple[str | None, str, str, str],
    *,
    flags: dict[str, bool] | None = None,
    **does: bool,
) -> Family:
    """Create a family.

    Args:
        control: BOS, EOS, special control tokens, and other control tokens, separated by spaces.
        flags: Flags of the control tokens.
        does: Further fields of the family.
    """
    bos, eos, special, plain = control
    # Tokens with explicit flags are not added again by transformers with its default flags.
    for names, is_special in ((special, True), (plain, False)):
        tokens = [
            AddedToken(one, special=is_special, **({"normalized": False} | (flags or {})))
            for one in names.split()
        ]
        (backend.add_special_tokens if is_special else backend.add_tokens)(tokens)
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos
    )
    tokenizer.chat_template = template
    return Family(name, tokenizer, **does)


_LLAMA3 = (
    "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> "
    "<|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> <|reserved_special_token_0|>"
)
_QWEN = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|image_pad|>"
_QWEN25_PLAIN = "<tool_call> </tool_call> <|fim_prefix|> <|fim_suffix|> <|repo_name|> <|file_sep|>"
_QWEN3_PLAIN = f"{_QWEN25_PLAIN} <tool_response> </tool_response> <think> </think>"
_DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>"
_DEEPSEEK_PLAIN = (
    "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> <｜fim▁begin｜> <|EOT|>"
)
_GEMMA = "<pad> <eos> <bos> <unk> <mask> <start_of_turn> <end_of_turn>"
_GEMMA_PLAIN = "<unused0> [multimodal] <table> </table> <h1>"
_MISTRAL = (
    "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS]"
)
_PHI3 = "<s> <|endoftext|> <|assistant|> <|system|> <|end|> <|user|> <|placeholder1|>"
_PHI4 = "<|endoftext|> <|im_start|> <|im_end|> <|im_sep|> <|fim_prefix|> <|dummy_0|>"


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """All families by name. Two also have a version whose normalizer alters control tokens."""
    llama = ("<|begin_of_text|>", "<|eot_id|>", _LLAMA3, "")
    qwen25, qwen3 = ((None, "<|im_end|>", _QWEN, plain) for plain in (_QWEN25_PLAIN, _QWEN3_PLAIN))
    deepseek = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", _DEEPSEEK, _DEEPSEEK_PLAIN)
    normalized = {"normalized": True}
    nfc, lower, nfkc = normalizers.NFC(), normalizers.Lowercase(), normalizers.NFKC()
    every = [
        _family(
            "llama-3.1", _byte_level(split=_SPLIT_LLAMA3), templates.LLAMA31, llama,
            tools=True, json_results=True,
        ),
        _family("qwen-2.5", _byte_level(nfc), templates.QWEN25, qwen25, tools=True),
        _family(
            "qwen-3", _byte_level(nfc), templates.QWEN3_THINKING, qwen3,
            tools=True, hides_thinking=True,
        ),
        _family(
            "qwen-3, lower-casing", _byte_level(lower), templates.QWEN3_THINKING, qwen3,
            flags=normalized, tools=True, hides_thinking=True,
        ),
        _family(
            "deepseek-r1-distill", _byte_level(), templates.DEEPSEEK_R1, deepseek,
            tools=True, hides_thinking=True,
        ),
        _family(
            "deepseek-r1-distill, NFKC", _byte_level(nfkc), templates.DEEPSEEK_R1, deepseek,
            flags=normalized, tools=True, hides_thinking=True,
        ),
        _family("gemma", _byte_level(), templates.GEMMA, ("<bos>", "<eos>", _GEMMA, _GEMMA_PLAIN)),
        # Turn tokens are in the tokenizer's vocabulary, so plain text can produce their ids.
        _family(
            "mistral", _unigram(_MISTRAL.split()), templates.MISTRAL, ("<s>", "</s>", _MISTRAL, ""),
            tools=True,
        ),
        # Every control token removes the white space that follows it.
        _family(
            "phi-3", _byte_level(), templates.PHI3, (None, "<|endoftext|>", _PHI3, "</s>"),
            flags={"rstrip": True}, swallows_blanks=True,
        ),
        _family(
            "phi-4", _byte_level(), templates.PHI4, (None, "<|im_end|>", _PHI4, ""),
            flags={"lstrip": True, "rstrip": True}, swallows_blanks=True,
        ),
    ]  # fmt: skip
    return {family.name: family for family in every}
