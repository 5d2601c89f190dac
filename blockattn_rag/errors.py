"""Every error the package raises on purpose.

::

    BlockAttnError
    ├── UnsupportedModelError        the model's attention cannot be cut in blocks exactly
    ├── SegmentationError            a text or prompt cannot be split in blocks
    ├── ContextOverflowError         prompt + new tokens exceed what the model can hold
    ├── MissError                    a block was not in the store and on_miss="error"
    ├── GrammarError                 a grammar cannot be compiled or followed
    ├── IncompleteAnswerError        an answer was cut before it was a whole object
    ├── ToolCallError                a model wrote a call of a tool that is none
    ├── DataError                    a training or evaluation record is malformed
    ├── DatabaseError                a database folder cannot serve what was asked
    ├── DivergedError                training came to a loss or weights that are not finite
    ├── StoreError                   an entry of the KV store cannot be used
    │   ├── CorruptEntryError        damaged, truncated, or of another format version
    │   ├── FingerprintMismatchError written by another model, tokenizer or dtype
    │   └── StoreUnavailableError    the store failed again and again and is not asked for a while
    └── ServingError                 a server cannot do, or did not do, what was asked
        ├── ProtocolError            what client or server said is not as the protocol has it
        └── LoadError                blocks of a prompt could not be loaded

A message says what was found, what was expected, and what to do. Bad arguments raise
``ValueError`` or ``TypeError``.
"""

from __future__ import annotations


class BlockAttnError(Exception):
    """Base of all errors of this package."""


class UnsupportedModelError(BlockAttnError):
    """The model cannot be run in block mode without changing its answers."""


class SegmentationError(BlockAttnError):
    """A text or prompt cannot be split into blocks."""


class ContextOverflowError(BlockAttnError):
    """The prompt and the tokens to generate do not fit in the model's context window."""


class MissError(BlockAttnError):
    """A block's KV was not in the store although ``on_miss="error"`` was asked for."""


class GrammarError(BlockAttnError, ValueError):
    """The grammar of an answer cannot be compiled or followed, or is too large."""


class IncompleteAnswerError(BlockAttnError, ValueError):
    """An answer that was to be an object ended, or was cut, before it was one.

    Args:
        message: how it ended, and what to do.
        text: the answer.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ToolCallError(BlockAttnError, ValueError):
    """A model was to call a tool, and called none, or wrote something that is no call."""


class DataError(BlockAttnError):
    """A record of training or evaluation data is malformed."""


class DatabaseError(BlockAttnError):
    """A database folder is missing, of another version, or cannot serve what was asked."""


class DivergedError(BlockAttnError):
    """Training came to a loss or to weights that are not finite; nothing was published."""


class StoreError(BlockAttnError):
    """An entry of the KV store cannot be used."""


class CorruptEntryError(StoreError):
    """A stored entry is damaged, truncated, or of another format version."""


class FingerprintMismatchError(StoreError):
    """A stored entry was written by another model, tokenizer or dtype."""


class StoreUnavailableError(StoreError):
    """A store failed several times in a row and is left alone for a while; this was told before."""


class ServingError(BlockAttnError):
    """A server cannot do what was asked in block mode, or answered in another way."""


class ProtocolError(ServingError, ValueError):
    """What client or server said, or a profile, is not as the protocol has it."""


class LoadError(ServingError):
    """Blocks of a prompt could not be loaded by a server.

    Args:
        message: which block of the prompt, and why.
        blocks: places of all those blocks among the prompt's context blocks, from 0.
        damaged: store keys of those whose entry is there and cannot be used, so that encoding them
            again mends it.
    """

    def __init__(
        self, message: str, blocks: tuple[int, ...] = (), damaged: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.blocks = blocks
        self.damaged = damaged
