"""Exceptions raised by this package.

Each message states what was found, what was expected, and what to do. Invalid arguments raise
``ValueError`` or ``TypeError``.
"""

from __future__ import annotations


class BlockAttnError(Exception):
    """Base class for this package's own exceptions."""


class UnsupportedModelError(BlockAttnError):
    """The model or its tokenizer does not support an operation, for example exact block mode."""


class SegmentationError(BlockAttnError):
    """A text or prompt cannot be split into blocks."""


class ContextOverflowError(BlockAttnError):
    """The prompt and the tokens to generate do not fit in the model's context window."""


class MissError(BlockAttnError):
    """A passage's KV is not in the store, and may not be computed, as with ``on_miss="error"``."""


class GrammarError(BlockAttnError, ValueError):
    """An answer's grammar is too large, cannot be compiled, or cannot be enforced."""


class IncompleteAnswerError(BlockAttnError, ValueError):
    """An answer ended, or was cut off, before its JSON was complete. ``text``: The answer."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ToolCallError(BlockAttnError, ValueError):
    """A tool call was expected, but the model produced none, or an invalid one."""


class DataError(BlockAttnError):
    """Training or evaluation data, or the files of an interrupted run, cannot be used."""


class DatabaseError(BlockAttnError):
    """A database folder is missing, damaged or of another version, or cannot serve the request."""


class DivergedError(BlockAttnError):
    """Training diverged: the loss or the weights became NaN or infinite. No model is saved."""


class StoreError(BlockAttnError):
    """The KV store failed, or an entry in it cannot be used."""


class CorruptEntryError(StoreError):
    """A stored entry is damaged, truncated, or in an unsupported format version."""


class FingerprintMismatchError(StoreError):
    """A stored entry belongs to a different model, tokenizer, dtype, text or namespace."""


class StoreUnavailableError(StoreError):
    """A store failed several times in a row and is temporarily skipped."""


class ServingError(BlockAttnError):
    """A server cannot be started or reached, or it rejected or failed a request."""


class ProtocolError(ServingError, ValueError):
    """A request, a response or a profile violates the protocol."""


class LoadError(ServingError):
    """A server could not load some blocks of a prompt.

    Args:
        blocks: Zero-based indices of the failed blocks among the prompt's context blocks.
        damaged: Store keys of failed blocks with unusable entries. Re-encoding these blocks
            replaces the entries.
    """

    def __init__(
        self, message: str, blocks: tuple[int, ...] = (), damaged: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.blocks = blocks
        self.damaged = damaged
