"""The exceptions of this package.

::

    BlockAttnError
    ├── UnsupportedModelError        block mode is not exact for this model
    ├── SegmentationError            a text or prompt cannot be split into blocks
    ├── ContextOverflowError         the prompt and the new tokens exceed the context window
    ├── MissError                    a block was not in the store and on_miss="error"
    ├── GrammarError                 a grammar cannot be compiled or followed
    ├── IncompleteAnswerError        an answer ended before its JSON object was complete
    ├── ToolCallError                the model produced no tool call or an invalid one
    ├── DataError                    a training or evaluation record is malformed
    ├── DatabaseError                a database folder cannot serve a request
    ├── DivergedError                the loss or the weights are no longer finite
    ├── StoreError                   an entry of the KV store cannot be used
    │   ├── CorruptEntryError        damaged, truncated, or of another format version
    │   ├── FingerprintMismatchError written by another model, tokenizer or dtype
    │   └── StoreUnavailableError    the store failed repeatedly and is skipped for a while
    └── ServingError                 a server rejected or failed a request
        ├── ProtocolError            a message violates the protocol
        └── LoadError                blocks of a prompt could not be loaded

Each message states what was found, what was expected, and what to do. Invalid arguments raise
``ValueError`` or ``TypeError``.
"""

from __future__ import annotations


class BlockAttnError(Exception):
    """Base class of all errors of this package."""


class UnsupportedModelError(BlockAttnError):
    """The model cannot be run in block mode without changing its answers."""


class SegmentationError(BlockAttnError):
    """A text or prompt cannot be split into blocks."""


class ContextOverflowError(BlockAttnError):
    """The prompt and the tokens to generate do not fit in the model's context window."""


class MissError(BlockAttnError):
    """A block's KV is not in the store, and ``on_miss`` is ``"error"``."""


class GrammarError(BlockAttnError, ValueError):
    """The grammar of an answer cannot be compiled, cannot be followed, or is too large."""


class IncompleteAnswerError(BlockAttnError, ValueError):
    """An answer ended, or was cut off, before its JSON object was complete.

    Args:
        message: How the answer ended, and what to do.
        text: Text of the answer.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ToolCallError(BlockAttnError, ValueError):
    """The model had to call a tool, but produced no tool call or an invalid one."""


class DataError(BlockAttnError):
    """A record of training or evaluation data is malformed."""


class DatabaseError(BlockAttnError):
    """A database folder is missing, has another version, or cannot serve the request."""


class DivergedError(BlockAttnError):
    """Training stopped because the loss or the weights are not finite. Nothing is published."""


class StoreError(BlockAttnError):
    """An entry of the KV store cannot be used."""


class CorruptEntryError(StoreError):
    """A stored entry is damaged, truncated, or of another format version."""


class FingerprintMismatchError(StoreError):
    """A stored entry was written by another model, tokenizer or dtype."""


class StoreUnavailableError(StoreError):
    """A store failed several times in a row and is skipped for a while."""


class ServingError(BlockAttnError):
    """A server rejected or failed a request, or did not answer in block mode."""


class ProtocolError(ServingError, ValueError):
    """A request, a response or a profile violates the protocol."""


class LoadError(ServingError):
    """A server could not load some blocks of a prompt.

    Args:
        message: Which block could not be loaded, and why.
        blocks: Indices of the failed blocks among the prompt's context blocks, from 0.
        damaged: Store keys of failed blocks whose stored entry is unusable. Encoding these blocks
            again replaces the entries.
    """

    def __init__(
        self, message: str, blocks: tuple[int, ...] = (), damaged: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.blocks = blocks
        self.damaged = damaged
