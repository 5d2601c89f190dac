"""Engine of an adapter: an existing engine, or the arguments for loading one."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockattn_rag.adapters.hints import ReuseHints
from blockattn_rag.adapters.server_source import ServerSource
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, known_digests
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.markers import content_spans, holds_orphans
from blockattn_rag.prompts.recognition import Recognize
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.store import KVStore
from blockattn_rag.store.passage_index import PassageIndex
from blockattn_rag.store.urls import lasts

logger = logging.getLogger("blockattn_rag")


def source_of(llm: Any, expected: str, *others: Any) -> EngineSource | ServerSource:
    """Return the source of the LLM passed to a component as ``llm=``."""
    if any(value is not None for value in others):
        raise ValueError("Pass only one of: llm=, a server, or a model with store and recipe")
    source = getattr(llm, "source", None)
    if not isinstance(source, EngineSource | ServerSource):
        raise TypeError(
            f"llm= must be the LLM that generates the answers, such as {expected}(...); found "
            f"{type(llm).__name__} {llm!r:.60}. Pass a model name as model=, or a server address "
            "as server="
        )
    return source


def source_with(
    server: str | Sequence[str] | None, api_key: Any, journal: Any, **arguments: Any
) -> EngineSource | ServerSource:
    """Create the source of an ingestion step: servers, or an engine loaded from ``arguments``."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if server is None:
        if given := [n for n, v in (("api_key", api_key), ("journal", journal)) if v is not None]:
            raise ValueError(f"{given[0]}= requires server=; pass the server's address, too")
        return EngineSource(**arguments)
    if arguments:
        raise ValueError(
            "A server already has a model, store and recipe: pass server= without "
            f"{', '.join(arguments)}"
        )
    return ServerSource(server, api_key, journal)


class EngineSource:
    """An existing engine, or the arguments for loading one.

    Language models load the engine when they are created (``load``), ingestion steps on first use.
    Copies of a component share the source, and therefore the weights.

    Args:
        engine: An existing engine. Excludes all other arguments.
        model_name: Name or path of a model, or a loaded transformers model.
        tokenizer_name: A transformers tokenizer, or its name or path. Default: the model's
            tokenizer.
        kv_store: A store, or a location for ``store.open_store``, such as a directory or
            ``"s3://bucket/kv"``. Default: in memory.
        model_kwargs: Additional arguments for loading the model, including ``tokenizer``.
        recipe: Recipe of block mode; see ``BlockAttentionEngine``.
    """

    def __init__(
        self,
        engine: BlockAttentionEngine | None = None,
        *,
        model_name: Any = None,
        tokenizer_name: Any = None,
        kv_store: KVStore | str | Path | None = None,
        device_map: str = "auto",
        model_kwargs: dict[str, Any] | None = None,
        recipe: RecipeLike = AUTO,
    ) -> None:
        if engine is not None and recipe != AUTO:
            raise ValueError(
                f"Found both recipe={str(recipe)!r} and engine=, which already has a recipe. "
                "Create the engine with the recipe: BlockAttentionEngine(model, store, recipe=...)."
            )
        if recipe != AUTO:
            known_digests(recipe, None, "")  # Fails early if the recipe does not exist.
        if (engine is None) == (model_name is None):
            raise ValueError(
                "Expected either engine= or a model: model_name= (or model= with tokenizer=); "
                f"found {'neither' if engine is None else 'both'}"
            )
        is_name = isinstance(model_name, (str, Path, type(None)))
        self._engine = engine
        self._model = str(model_name) if isinstance(model_name, Path) else model_name
        own = (model_kwargs or {}).get("tokenizer")
        self._tokenizer = tokenizer_name if own is None else own
        if self._tokenizer is None and not is_name:
            raise ValueError(
                "A loaded model was passed without its tokenizer; pass model_kwargs={'tokenizer': "
                "...}"
            )
        self._kv_store = kv_store if engine is None else engine.store
        self._recipe = str(recipe) if isinstance(recipe, Path) else recipe
        self._device_map = device_map
        self._model_kwargs = dict(model_kwargs or {})
        if "torch_dtype" in self._model_kwargs:  # Transformers 4 calls dtype torch_dtype.
            self._model_kwargs["dtype"] = self._model_kwargs.pop("torch_dtype")
        self._lock = threading.RLock()
        self._hints = None if self._kv_store is None else ReuseHints()
        self._has_warned = False

    @property
    def live_parts(self) -> list[str]:
        """Names of arguments that are objects, which other processes cannot load by name."""
        live = {
            "engine": self._engine is not None and not self._model,
            "model": self._model is not None and not isinstance(self._model, str),
            "tokenizer": not isinstance(self._tokenizer, (str, Path, type(None))),
            "kv_store": self._kv_store is not None and _location(self._kv_store) is None,
            "recipe": isinstance(self._recipe, Recipe),
        }
        return [name for name, is_live in live.items() if is_live]

    def fields(self) -> dict[str, Any]:
        name = self._model if isinstance(self._model, str) else None
        if self._engine is not None and name is None:
            name = self._engine.model.name
        tokenizer_name = str(self._tokenizer) if isinstance(self._tokenizer, (str, Path)) else None
        return {
            "model_name": name,
            "tokenizer_name": tokenizer_name,
            "kv_store": _location(self._kv_store),
            "device_map": self._device_map,
            "model_kwargs": self._model_kwargs,
            "recipe": str(self._recipe),
        }

    def asking_for(self, fields: dict[str, Any]) -> EngineSource:
        """Return a copy of this source with changed fields."""
        changed = {**self.fields(), **fields}
        if changed["recipe"] == str(self._recipe):  # Keep the `Recipe` object.
            changed["recipe"] = self._recipe
        return EngineSource(**changed)

    @property
    def follows_grammars(self) -> bool:
        """Whether grammars can constrain answers."""
        return find_spec("llguidance") is not None

    @property
    def lasting_store(self) -> str | None:
        """Location of a store that other processes can open, or None if it is in memory."""
        place = _location(self._kv_store)
        return place if place and lasts(place) else None

    @property
    def storage(self) -> dict[str, Any]:
        """Settings that determine how passages are encoded and stored, for ingestion caches."""
        engine = self.engine
        temporary = f"{type(engine.store).__name__} {id(engine.store)}"
        return {
            "fingerprint": engine.model.fingerprint,
            "store": self.lasting_store or temporary,
            "namespace": engine.access.namespace,
            "encoding": list(engine.recipe.encoding),
        }

    def encode(
        self, texts: Sequence[str], template: BlockTemplate, *, show_progress: bool
    ) -> EncodeStats:
        """Encode passages that are not stored yet. Raises the same errors as ``precompute``."""
        blocks = [Block(text, template) for text in texts]
        return self.engine.precompute(blocks, show_progress=show_progress)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that answers depend on, in addition to a component's fields.

        For an existing engine: its model, recipe and KV dtype. Otherwise: the recipes that the
        engine may use once it is loaded.
        """
        if "engine" in self.live_parts:
            engine = self.engine
            return {
                "fingerprint": engine.model.fingerprint,
                "recipe": engine.recipe.digest,
                "kv_dtype": engine.kv_dtype,
            }
        model = self._model if isinstance(self._model, str) else ""
        return {"recipes": known_digests(self._recipe, _location(self._kv_store), model)}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> EngineSource:
        # Weights and locks are shared, never copied.
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        if live := self.live_parts:
            raise pickle.PicklingError(
                f"This was created from live objects ({' and '.join(live)}), which cannot be sent "
                "to another process; pass the model by name, and the store as a directory or an "
                "address"
            )
        # Send the store object, which may have a size limit.
        return partial(EngineSource, **{**self.fields(), "kv_store": self._kv_store}), ()

    def load(self) -> None:
        """Load the model, so that the first question is as fast as later ones.

        Has no effect on an existing engine.
        """
        if self._engine is None:
            model = self.engine.model
            # Each property is measured on first access, which takes as long as several answers.
            _ = (model.fingerprint, model.rules, model.graph_runner, model.has_causal_kernel)

    @property
    def engine(self) -> BlockAttentionEngine:
        with self._lock:
            if self._engine is None:
                self._engine = BlockAttentionEngine.from_pretrained(
                    self._model,
                    tokenizer=self._tokenizer,
                    store=self._kv_store,
                    recipe=self._recipe,
                    **{"device": self._device_map, **self._loading},
                )
            return self._engine

    @property
    def _loading(self) -> dict[str, Any]:
        """``model_kwargs`` without the tokenizer."""
        return {k: value for k, value in self._model_kwargs.items() if k != "tokenizer"}

    def noted(self, prompt: BlockPrompt) -> BlockPrompt:
        """Return the prompt unchanged. If it cannot reuse passages, log a hint (``ReuseHints``)."""
        if self._hints is not None:
            self._hints.look_at(prompt)
        return prompt

    def check_recognizes(self) -> None:
        """Raise ValueError if the engine cannot recognize passages in plain text."""
        if isinstance(self._kv_store, KVStore):
            PassageIndex(self._kv_store)

    def prompt_of(
        self, spans: Iterable[Span], template: BlockTemplate, *, recognize: Recognize = False
    ) -> BlockPrompt:
        """Create a prompt from spans.

        Args:
            recognize: Whether to also recognize stored passages in text without markers, and in
                system messages. The first prompt with ``recognize`` loads the model.
        """
        if recognize:
            engine = self.engine
            in_system = recognize == "system"
            spans = engine.passages.split(spans, engine.access, in_system=in_system)
        return BlockPrompt.from_spans(spans, template)

    def string_spans(self, prompt: str, *, parse_special_tokens: bool) -> list[Span]:
        """Split a prompt string into passages and other text.

        Args:
            parse_special_tokens: Whether to parse control tokens outside of passages.
        """
        if parse_special_tokens:
            if holds_orphans(prompt):
                raise SegmentationError(
                    "Found a passage that a text splitter cut, in a prompt whose control tokens "
                    "are parsed: control tokens in the passage could end the turn. Keep passages "
                    "complete with configure(llm) or block_query_engine, or use chat messages"
                )
            return content_spans(prompt, "prompt")
        spans = content_spans(prompt, "conversation")
        if not self._has_warned and any(
            self.tokenizer.spells_control_token(span.text)
            for span in spans
            if span.origin == "conversation"
        ):
            self._has_warned = True
            logger.warning(
                "Found control tokens of the model in a prompt string. They are treated as text, "
                "because they may come from passages or questions. If your prompt template "
                "contains them, pass parse_special_tokens=True (docs/security.md)"
            )
        return spans

    async def loaded_engine(self) -> BlockAttentionEngine:
        if self._engine is not None:
            return self._engine
        return await asyncio.to_thread(lambda: self.engine)

    @property
    def tokenizer(self) -> BlockTokenizer:
        return self.engine.model.tokenizer

    @property
    def max_context_tokens(self) -> int:
        return self.engine.model.max_context_tokens


def _location(store: KVStore | str | Path | None) -> str | None:
    if isinstance(store, (str, Path)):
        return str(store)
    place = getattr(store, "path", None) or getattr(store, "url", None)
    return None if place is None else str(place)
