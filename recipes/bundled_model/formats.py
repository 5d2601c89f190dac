"""Prompt formats that the bundled model is trained on.

The texts of the package's formats are imported from :mod:`blockattn_rag.prompts.formats`; the
others are copied from LlamaIndex's and LangChain's default prompts.

A prompt consists of ``head`` (special tokens are parsed, BOS is prepended), the passages (blocks
tokenized separately), ``tail`` with the question (special tokens are parsed), and the answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from blockattn_rag.prompts.formats import BLANK_LINE, CHAT, TURBORAG, Passage
from blockattn_rag.prompts.formats import BLOCK_ATTENTION as BLOCK_ATTENTION_PAPER

LANGCHAIN_HEAD = "Answer the question using only the context below.\n\nContext:\n"
PIECES_HEAD = (
    "Use the following pieces of context to answer the question at the end. If you don't know "
    "the answer, just say that you don't know, don't try to make up an answer.\n\n"
)
SUMMARIZE_HEAD = "Context information from multiple sources is below.\n---------------------\n"
SUMMARIZE_TAIL = CHAT.after.replace("context information", "information from multiple sources")
CONTEXT_CHAT_HEAD = "Use the context information below to assist the user.\n--------------------\n"
CONDENSE_CHAT_HEAD = (
    "\n  The following is a friendly conversation between a user and an AI assistant.\n"
    "  The assistant is talkative and provides lots of specific details from its context.\n"
    "  If the assistant does not know the answer to a question, it truthfully says it\n"
    "  does not know.\n\n  Here are the relevant documents for the context:\n\n  "
)
CONDENSE_CHAT_TAIL = (
    "\n\n  Instruction: Based on the above documents, provide a detailed answer for the user "
    'question below.\n  Answer "don\'t know" if not present in the document.\n  '
)

SYSTEM, USER = "<|system|>\n", "<|user|>\n"
END = "<|end|>"
TO_USER, TO_ASSISTANT = f"{END}\n<|user|>\n", f"{END}\n<|assistant|>\n"


def follow_up(question: str) -> str:
    """Return the text between the end token of an answer and the next answer."""
    return TO_USER.removeprefix(END) + question + TO_ASSISTANT


@dataclass(frozen=True, slots=True)
class Format:
    """Prompt format. ``before`` and ``after`` surround each passage; ``tail`` contains
    ``{question}``."""

    head: str
    tail: str
    before: str = ""
    after: str = BLANK_LINE.after
    views: tuple[str, ...] = ("{text}",)

    @property
    def frame_chars(self) -> int:
        """Length of the text around the passages and the question."""
        return len(self.head) + len(self.tail)

    def passage(self, passage: Passage, view: str) -> str:
        """Return the text of a passage's block, including its template."""
        return self.before + self.text(passage, view) + self.after

    @staticmethod
    def text(passage: Passage, view: str) -> str:
        """Return the canonical text of a passage, without the template."""
        return view.format(title=passage.title, text=passage.text)


_VIEWS = ("{text}", CHAT.titled)
_DASHED = BLOCK_ATTENTION_PAPER.template.before + BLOCK_ATTENTION_PAPER.titled

LLAMA_INDEX_CHAT = Format(
    f"{SYSTEM}{CHAT.system}{TO_USER}{CHAT.before}", CHAT.after + TO_ASSISTANT, views=_VIEWS
)
LLAMA_INDEX_TEXT = Format(CHAT.before, CHAT.after, views=_VIEWS)
BLOCK_ATTENTION = Format(
    USER + BLOCK_ATTENTION_PAPER.before,
    BLOCK_ATTENTION_PAPER.after + TO_ASSISTANT,
    after=BLOCK_ATTENTION_PAPER.template.after,
    views=(_DASHED,),
)
LANGCHAIN_CHAT = Format(
    f"{SYSTEM}{LANGCHAIN_HEAD}", f"{TO_USER}{{question}}{TO_ASSISTANT}", views=_VIEWS
)
LANGCHAIN_LINES = Format(
    LANGCHAIN_CHAT.head, LANGCHAIN_CHAT.tail, after="\n", views=(*_VIEWS, _DASHED)
)
PIECES = Format(
    USER + PIECES_HEAD, "\n\nQuestion: {question}\nHelpful Answer:" + TO_ASSISTANT, views=_VIEWS
)
AGENT = Format(
    f"{SYSTEM}{LANGCHAIN_HEAD.strip()}{TO_USER}", "\n\n{question}" + TO_ASSISTANT, views=_VIEWS
)
TURBO_RAG = Format(
    f"{SYSTEM}{TURBORAG.system}{TO_USER}{TURBORAG.before}",
    TURBORAG.after + TO_ASSISTANT,
    TURBORAG.template.before,
    TURBORAG.template.after,
    views=("{text}", TURBORAG.titled),
)
SUMMARIZE_CHAT = Format(USER + SUMMARIZE_HEAD, SUMMARIZE_TAIL + TO_ASSISTANT, views=_VIEWS)
SUMMARIZE_TEXT = Format(SUMMARIZE_HEAD, SUMMARIZE_TAIL, views=_VIEWS)
CONTEXT_CHAT = Format(
    f"{SYSTEM}{CONTEXT_CHAT_HEAD}",
    f"\n--------------------\n{TO_USER}{{question}}{TO_ASSISTANT}",
    views=_VIEWS,
)
CONDENSE_CHAT = Format(
    f"{SYSTEM}{CONDENSE_CHAT_HEAD}",
    f"{CONDENSE_CHAT_TAIL}{TO_USER}{{question}}{TO_ASSISTANT}",
    views=_VIEWS,
)

#: Formats with their share of the training prompts.
MIX: tuple[tuple[Format, float], ...] = (
    (LLAMA_INDEX_CHAT, 0.2),
    (LLAMA_INDEX_TEXT, 0.17),
    (BLOCK_ATTENTION, 0.12),
    (LANGCHAIN_CHAT, 0.12),
    (LANGCHAIN_LINES, 0.08),
    (AGENT, 0.06),
    (PIECES, 0.06),
    (TURBO_RAG, 0.06),
    (SUMMARIZE_CHAT, 0.03),
    (SUMMARIZE_TEXT, 0.03),
    (CONTEXT_CHAT, 0.04),
    (CONDENSE_CHAT, 0.03),
)


def draw_format(rng: random.Random, longest: int | None = None) -> Format:
    """Draw a format by its share, with at most ``longest`` characters around the passages."""
    fit = [(f, share) for f, share in MIX if longest is None or f.frame_chars <= longest]
    return rng.choices([f for f, _ in fit], [share for _, share in fit])[0]
