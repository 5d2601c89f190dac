"""Interface of engines, local and remote, that adapters and pipelines use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from blockattn_rag.engine.find_recipe import RecipeLike
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.pending import MAX_BATCH, Group, LatePrompt, PendingAnswer, Prompt
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.tokenization import BlockTokenizer


def blocks_to_encode(texts: Sequence[str | Block] | BlockPrompt) -> tuple[list[Block], bool]:
    """The argument of ``encode`` as blocks, and whether the first block starts a prompt.

    Raises:
        TypeError: the argument is not a list of texts.
    """
    if isinstance(texts, str) or not isinstance(texts, (Iterable, BlockPrompt)):
        raise TypeError(
            f"encode expects a list of texts, found {type(texts).__name__}: pass [text]."
        )
    as_prompt = isinstance(texts, BlockPrompt)
    given = texts.context if isinstance(texts, BlockPrompt) else texts
    return [text if isinstance(text, Block) else Block(text) for text in given], as_prompt


class EngineModel(Protocol):
    """An engine's model."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def tokenizer(self) -> BlockTokenizer: ...

    @property
    def max_context_tokens(self) -> int: ...


class Engine(Protocol):
    """Methods that ``BlockAttentionEngine`` and ``RemoteEngine`` share.

    See ``BlockAttentionEngine`` for their documentation.
    """

    @property
    def model(self) -> EngineModel: ...

    @property
    def recipe(self) -> Recipe | RecipeOutline: ...

    def generate(self, prompt: Prompt, **options: Any) -> Generation: ...

    def submit(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> PendingAnswer: ...

    async def agenerate(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> Generation: ...

    def stream(self, prompt: Prompt, **options: Any) -> Generator[GenerationChunk, None, None]: ...

    def astream(
        self, prompt: LatePrompt, **options: Any
    ) -> AsyncGenerator[GenerationChunk, None]: ...

    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = MAX_BATCH, **options: Any
    ) -> list[Generation]: ...

    def encode(
        self,
        texts: Sequence[str | Block] | BlockPrompt,
        *,
        show_progress: bool = False,
        recipe: RecipeLike | None = None,
    ) -> list[str]: ...

    def precompute(
        self,
        blocks: Sequence[Block],
        *,
        as_prompt: bool = False,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        batch_tokens: int | None = None,
        recipe: RecipeLike | None = None,
    ) -> EncodeStats: ...

    def contains(self, block: Block, *, first: bool = False) -> bool: ...
