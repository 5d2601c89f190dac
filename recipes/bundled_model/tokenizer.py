"""The bundled tokenizer: a byte-level BPE that splits numbers into digits, names into syllables.

Digits allow the model to compare numbers digit by digit. Invented names are always split into their
two syllables, so that names of test entities are tokenized like those in training. As a byte-level
tokenizer, it can encode any text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes.bundled_model.formats import MIX
from recipes.bundled_model.names import FIRST, SECOND
from recipes.bundled_model.scenes import QUESTION_KINDS, turns_of, write_scene

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
DOC_TOKENS = ("<|doc_start|>", "<|doc_end|>")
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLES, *DOC_TOKENS)
VOCAB_SIZE = 1_280

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def _training_text(seed: int, scenes: int) -> Iterator[str]:
    """Yield passages, questions, answers and prompt templates, with training entities only."""
    rng = random.Random(f"{seed}/tokenizer")
    for number in range(scenes):
        scene = write_scene(rng, "train", 6, second_editions=1)
        yield from (article.passage.text for article in scene)
        for kind in QUESTION_KINDS:
            for turn in turns_of(scene, rng, kind)[:3]:
                yield from (turn.question, turn.answer)
        if number % 4 == 0:
            for prompt, _ in MIX:
                yield from (prompt.head, prompt.tail, *prompt.views)


def build_tokenizer(seed: int = 0, scenes: int = 1_200) -> PreTrainedTokenizerFast:
    """Train the tokenizer. Like Llama's tokenizer, ``tokenizer(text)`` prepends BOS."""
    tokenizer = Tokenizer(models.BPE())
    first_syllable = rf" ?(?:{'|'.join(FIRST)})(?=(?:{'|'.join(SECOND)})(?![a-z]))"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(first_syllable), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seed, scenes), trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [bos]),
        ]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[*ROLES, *DOC_TOKENS],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4_096,
    )
