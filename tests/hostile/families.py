"""Small tokenizers with the control tokens, flags and normalisers of the model families."""

from __future__ import annotations

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

from tests.hostile import templates

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


@dataclass(frozen=True)
class Family:
    """A family's tokenizer, and what its chat template does with contents.

    Args:
        tools: the template writes tool calls and their results.
        json_results: it writes a tool's result as JSON.
        hides_thinking: it leaves out what an earlier answer says before ``</think>``.
        swallows_blanks: control tokens take the white space beside them.
    """

    name: str
    tokenizer: PreTrainedTokenizerFast
    tools: bool = False
    json_results: bool = False
    hides_thinking: bool = False
    swallows_blanks: bool = False

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """Every control token as text."""
        return tuple(sorted(self.tokenizer.get_added_vocab()))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of control tokens: added ones, and pieces of the vocabulary with such a string."""
        vocabulary = self.tokenizer.get_vocab()
        return frozenset(vocabulary[token] for token in self.controls)

    def controls_in(self, ids: list[int]) -> list[str]:
        """The control tokens of ``ids``, in order."""
        return [str(self.tokenizer.convert_ids_to_tokens(i)) for i in ids if i in self.control_ids]

    def parsed(self, text: str) -> list[int]:
        """Ids of a text with every control token recognised, as transformers would have it."""
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=False)
        return list(encoded["input_ids"])

    def decoded(self, ids: list[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))

    def as_decoded(self, text: str) -> str:
        """What a text looks like when it comes back from ids: the tokenizer's normal form."""
        text = text.encode("utf-8", "replace").decode()
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        text = normalizer.normalize_str(text) if normalizer is not None else text
        return text.replace("▁", " ") if self.name == "mistral" else text


def _byte_level(normalizer: Any = None, *, split: Regex | None = None) -> Tokenizer:
    """Byte-level BPE, trained on a few sentences."""
    backend = Tokenizer(models.BPE(ignore_merges=split is not None))
    if normalizer is not None:
        backend.normalizer = normalizer
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(split, "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_SENTENCES, trainer)
    return backend


def _unigram(pieces: list[str]) -> Tokenizer:
    """Unigram with byte fallback; ``pieces`` (control tokens) are in its own vocabulary."""
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


def _tokenizer(
    backend: Tokenizer,
    template: str,
    *,
    bos: str | None,
    eos: str,
    special: str,
    plain: str = "",
    **flags: bool,
) -> PreTrainedTokenizerFast:
    """Put control tokens on a backend: ``special`` and not special ones, separated by blanks."""
    # What transformers adds by itself has its own flags; with ours they are there already.
    for names, is_special in ((special, True), (plain, False)):
        tokens = [AddedToken(name, special=is_special, **flags) for name in names.split()]
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
    return tokenizer


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


def _llama3(name: str) -> Family:
    tokenizer = _tokenizer(
        _byte_level(split=_SPLIT_LLAMA3),
        templates.LLAMA3,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        special=_LLAMA3,
        normalized=False,
    )
    return Family(name, tokenizer, tools=True, json_results=True)


def _qwen(name: str, template: str, plain: str, *, normalizer: Any = None) -> Family:
    tokenizer = _tokenizer(
        _byte_level(normalizer or normalizers.NFC()),
        template,
        bos=None,
        eos="<|im_end|>",
        special=_QWEN,
        plain=plain,
        normalized=normalizer is not None,
    )
    return Family(name, tokenizer, tools=True, hides_thinking=template == templates.QWEN3)


def _deepseek(name: str, *, normalizer: Any = None) -> Family:
    tokenizer = _tokenizer(
        _byte_level(normalizer),
        templates.DEEPSEEK_R1,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        special=_DEEPSEEK,
        plain=_DEEPSEEK_PLAIN,
        normalized=normalizer is not None,
    )
    return Family(name, tokenizer, tools=True, hides_thinking=True)


def _gemma() -> Family:
    tokenizer = _tokenizer(
        _byte_level(),
        templates.GEMMA,
        bos="<bos>",
        eos="<eos>",
        special=_GEMMA,
        plain=_GEMMA_PLAIN,
        normalized=False,
    )
    return Family("gemma", tokenizer)


def _mistral() -> Family:
    # Turn tokens are pieces of the model itself: text alone can give their ids.
    tokenizer = _tokenizer(
        _unigram(_MISTRAL.split()),
        templates.MISTRAL,
        bos="<s>",
        eos="</s>",
        special=_MISTRAL,
        normalized=False,
    )
    return Family("mistral", tokenizer, tools=True)


def _phi3() -> Family:
    # Each control token takes the white space after it.
    tokenizer = _tokenizer(
        _byte_level(),
        templates.PHI3,
        bos=None,
        eos="<|endoftext|>",
        special=_PHI3,
        plain="</s>",
        rstrip=True,
        normalized=False,
    )
    return Family("phi-3", tokenizer, swallows_blanks=True)


def _phi4() -> Family:
    tokenizer = _tokenizer(
        _byte_level(),
        templates.PHI4,
        bos=None,
        eos="<|im_end|>",
        special=_PHI4,
        lstrip=True,
        rstrip=True,
        normalized=False,
    )
    return Family("phi-4", tokenizer, swallows_blanks=True)


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Every family by name; two of them once more with a normaliser that hits control tokens."""
    every = [
        _llama3("llama-3.1"),
        _llama3("llama-3.2"),
        _qwen("qwen-2.5", templates.QWEN25, _QWEN25_PLAIN),
        _qwen("qwen-3", templates.QWEN3, _QWEN3_PLAIN),
        _qwen("qwen-3, lower-casing", templates.QWEN3, _QWEN3_PLAIN,
              normalizer=normalizers.Lowercase()),
        _deepseek("deepseek-r1-distill"),
        _deepseek("deepseek-r1-distill, NFKC", normalizer=normalizers.NFKC()),
        _gemma(),
        _mistral(),
        _phi3(),
        _phi4(),
    ]  # fmt: skip
    return {family.name: family for family in every}
