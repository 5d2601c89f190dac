"""Model sources of framework components: an engine in this process, or servers."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blockattn_rag.adapters.hints import ReuseHints
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, known_digests
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.markers import content_spans, holds_orphans
from blockattn_rag.prompts.recognition import Recognize
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.store import KVStore
from blockattn_rag.store.passage_index import PassageIndex
from blockattn_rag.store.urls import lasts

logger = logging.getLogger("blockattn_rag")


class EngineSource:
    """An existing engine, or the arguments for loading one.

    Language models load the engine when they are created (``load``), ingestion steps on first use.
    Copies of a component share the source, and therefore the weights.

    Args:
        model_name: Name or path of a model, or a loaded transformers model.
        tokenizer_name: A transformers tokenizer, or its name or path.
        model_kwargs: Additional arguments for loading the model, such as ``tokenizer``.
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
        if recipe != AUTO:
            if engine is not None:
                raise ValueError(
                    f"Found both recipe={str(recipe)!r} and engine=, which already has a recipe. "
                    "Create the engine with the recipe: "
                    "BlockAttentionEngine(model, store, recipe=...)."
                )
            known_digests(recipe, None, "")  # Fails early if the recipe does not exist.
        if (engine is None) == (model_name is None):
            raise ValueError(
                "Expected either engine= or a model: model_name= (or model= with tokenizer=); "
                f"found {'neither' if engine is None else 'both'}"
            )
        self._engine = engine
        self._model = _as_text(model_name)
        self._model_kwargs = dict(model_kwargs or {})
        if "torch_dtype" in self._model_kwargs:  # Transformers 4 calls dtype torch_dtype.
            self._model_kwargs["dtype"] = self._model_kwargs.pop("torch_dtype")
        own = self._model_kwargs.get("tokenizer")
        self._tokenizer = _as_text(tokenizer_name if own is None else own)
        if self._tokenizer is None and not isinstance(self._model, str | None):
            raise ValueError(
                "A loaded model was passed without its tokenizer; pass model_kwargs={'tokenizer': "
                "...}"
            )
        self._kv_store = kv_store if engine is None else engine.store
        location: Any = self._kv_store
        if isinstance(location, KVStore):
            location = getattr(location, "path", None) or getattr(location, "url", None)
        self._location = None if location is None else str(location)
        self._recipe = _as_text(recipe)
        self._device_map = device_map
        self._lock = threading.RLock()
        self.hints = None if self._kv_store is None else ReuseHints()
        self._has_warned = False

    def fields(self) -> dict[str, Any]:
        """Return the constructor arguments, with a name, a location or None in place of objects."""
        name = self._model if isinstance(self._model, str) else None
        if self._engine is not None and name is None:
            name = self._engine.model.name
        return {
            "model_name": name,
            "tokenizer_name": self._tokenizer if isinstance(self._tokenizer, str) else None,
            "kv_store": self._location,
            "device_map": self._device_map,
            "model_kwargs": self._model_kwargs,
            "recipe": str(self._recipe),
        }

    def with_fields(self, fields: dict[str, Any]) -> EngineSource:
        """Return this source, or a copy with these fields if they differ from its own."""
        own = self.fields()
        if all(own.get(name) == value for name, value in fields.items()):
            return self
        changed = {**own, **fields}
        if changed["recipe"] == str(self._recipe):  # Keep the `Recipe` object.
            changed["recipe"] = self._recipe
        return EngineSource(**changed)

    @property
    def lasting_store(self) -> str | None:
        """Location of the store if other processes can open it, otherwise None."""
        return self._location if self._location and lasts(self._location) else None

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

    @property
    def identity(self) -> dict[str, Any]:
        """Values that answers depend on, in addition to a component's fields. Loads no model."""
        if self._model is None:
            engine = self.engine
            return {
                "fingerprint": engine.model.fingerprint,
                "recipe": engine.recipe.digest,
                "kv_dtype": engine.kv_dtype,
            }
        model = self._model if isinstance(self._model, str) else ""
        return {"recipes": known_digests(self._recipe, self._location, model)}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> EngineSource:
        # Weights and locks are shared, never copied.
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        live = {
            "engine": self._model is None,
            "model": not isinstance(self._model, str | None),
            "tokenizer": not isinstance(self._tokenizer, str | None),
            "kv_store": self._kv_store is not None and self._location is None,
            "recipe": isinstance(self._recipe, Recipe),
        }
        if names := [name for name, is_live in live.items() if is_live]:
            raise pickle.PicklingError(
                f"Found live objects ({' and '.join(names)}), which cannot be sent "
                "to another process; pass the model by name, and the store as a directory or an "
                "address, or use a single process (an ingestion pipeline without num_workers)"
            )
        # Send the store object, which may have a size limit.
        return partial(EngineSource, **{**self.fields(), "kv_store": self._kv_store}), ()

    @property
    def engine(self) -> BlockAttentionEngine:
        with self._lock:
            if self._engine is None:
                options = {"device": self._device_map, **self._model_kwargs}
                options["tokenizer"] = self._tokenizer
                self._engine = BlockAttentionEngine.from_pretrained(
                    self._model, store=self._kv_store, recipe=self._recipe, **options
                )
            return self._engine

    async def loaded_engine(self) -> BlockAttentionEngine:
        if self._engine is not None:
            return self._engine
        return await asyncio.to_thread(lambda: self.engine)

    def load(self) -> None:
        """Load the model, so that the first question is as fast as later ones."""
        if self._engine is None:
            model = self.engine.model
            # These properties are computed on first access, which takes as long as several answers.
            _ = (model.fingerprint, model.rules, model.graph_runner, model.has_causal_kernel)

    def check_recognizes(self) -> None:
        """Raise ValueError if a store object was passed that cannot store a passage index."""
        if isinstance(self._kv_store, KVStore):
            PassageIndex(self._kv_store)

    def encode(
        self, texts: Sequence[str], template: BlockTemplate, *, show_progress: bool
    ) -> EncodeStats:
        """Encode passages that are not stored yet."""
        blocks = [Block(text, template) for text in texts]
        return self.engine.precompute(blocks, show_progress=show_progress)

    def prompt_of(
        self, spans: Iterable[Span], template: BlockTemplate, *, recognize: Recognize = False
    ) -> BlockPrompt:
        """Create a prompt. ``recognize``: Whether to find passages in text without markers."""
        if recognize:
            engine = self.engine
            in_system = recognize == "system"
            spans = engine.passages.split(spans, engine.access, in_system=in_system)
        return BlockPrompt.from_spans(spans, template)

    def string_spans(self, prompt: str, *, parse_special_tokens: bool) -> list[Span]:
        """Split a prompt. Control tokens are treated as text without ``parse_special_tokens``."""
        if parse_special_tokens:
            if holds_orphans(prompt):
                raise SegmentationError(
                    "Found a passage that a text splitter cut in a prompt whose control tokens "
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

    @property
    def tokenizer(self) -> BlockTokenizer:
        return self.engine.model.tokenizer


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


class ServerSource:
    """Servers that share a store and encode passages into it.

    The API key is neither included in ``fields`` nor pickled; other processes read it from the
    environment variable ``BLOCKATTN_RAG_API_KEY``. For ``journal``, see ``ServerPool``.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        api_key: str | None = None,
        journal: str | Path | None = None,
    ) -> None:
        from blockattn_rag.server import ServerClient, ServerPool  # Requires the extra `serving`.

        addresses = [server] if isinstance(server, str) else server
        clients = [ServerClient(url, api_key) for url in addresses]
        self._urls = [client.url for client in clients]
        self._server = self._urls[0] if isinstance(server, str) else self._urls
        self._pool = ServerPool(clients, journal)
        self._journal = None if journal is None else str(journal)

    def fields(self) -> dict[str, Any]:
        """Return the constructor arguments, without the API key."""
        return {"server": self._server, "journal": self._journal}

    @property
    def lasting_store(self) -> str:
        """Addresses of the servers, separated by spaces. They identify the store."""
        return " ".join(self._urls)

    @property
    def storage(self) -> dict[str, Any]:
        info = self._pool.info
        return {
            "fingerprint": info.fingerprint,
            "store": self.lasting_store,
            "namespace": info.namespace,
            "encoding": [*info.recipe.encoding],
        }

    def encode(
        self, texts: Sequence[str], template: BlockTemplate, *, show_progress: bool
    ) -> EncodeStats:
        if template != BLANK_LINE:
            raise ValueError(
                f"Unsupported block_template={template}: servers use {BLANK_LINE}; remove the "
                "argument"
            )
        return self._pool.encode(texts, show_progress=show_progress)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ServerSource:
        return self  # Connections are shared, never copied.

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerSource, (self._server, None, self._journal)


Source = EngineSource | ServerSource


def ingestion_source(
    llm: Any,
    expected: str,
    *,
    server: str | Sequence[str] | None,
    api_key: str | None,
    journal: str | Path | None,
    **arguments: Any,
) -> Source:
    """Return the source of an ingestion step: the source of ``llm``, servers, or a new engine.

    ``expected``: Name of the class that ``llm`` should have. ``arguments``: For ``EngineSource``.
    """
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if llm is not None:
        if arguments or any(value is not None for value in (server, api_key, journal)):
            raise ValueError("Pass only one of: llm=, a server, or a model with store and recipe")
        source = getattr(llm, "source", None)
        if isinstance(source, Source):
            return source
        raise TypeError(
            f"llm= must be the LLM that generates the answers, such as {expected}(...); found "
            f"{type(llm).__name__} {llm!r:.60}. Pass a model name as model=, or a server address "
            "as server="
        )
    if server is None:
        for name, value in (("api_key", api_key), ("journal", journal)):
            if value is not None:
                raise ValueError(f"{name}= requires server=; pass the server's address, too")
        return EngineSource(**arguments)
    if arguments:
        raise ValueError(
            "A server already has a model, store and recipe: pass server= without "
            f"{', '.join(arguments)}"
        )
    return ServerSource(server, api_key, journal)
