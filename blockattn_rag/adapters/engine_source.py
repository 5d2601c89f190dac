"""Where the adapters get their engine: given ready, or loaded once when it is first needed."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockattn_rag.adapters.hints import ReuseHints
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, known_digests
from blockattn_rag.engine.pending import Group
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.errors import SegmentationError
from blockattn_rag.model.loading import load_config, load_tokenizer
from blockattn_rag.model.probe import position_limit
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.prompts.marked_text import content_spans, holds_orphans
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.store import KVStore
from blockattn_rag.store.urls import lasts

logger = logging.getLogger("blockattn_rag")


def source_of(llm: Any, expected: str) -> EngineSource:
    """The source of what was given as ``llm=``.

    Raises:
        TypeError: it has none; it is no LLM of this package, such as ``expected``.
    """
    source = getattr(llm, "source", None)
    if not isinstance(source, EngineSource):
        raise TypeError(
            f"llm= takes the LLM that will answer, such as {expected}(...); found "
            f"{type(llm).__name__} {llm!r:.60}. A model's name goes into model="
        )
    return source


class EngineSource:
    """An engine, or how to load one. Copies of a component share it, and so one set of weights.

    Args:
        engine: a ready engine; instead of all else.
        model_name: name or path of a model, or a loaded transformers model.
        tokenizer_name: a transformers tokenizer, or its name or path; None takes the model's.
        kv_store: a store, or what ``store.open_store`` takes, such as a directory or
            ``"s3://bucket/kv"``; None keeps keys and values in memory.
        device_map: a torch device, or ``"auto"``.
        model_kwargs: further arguments for loading the model, ``tokenizer`` among them; with
            ``api_base``, of ``RemoteEngine``, such as ``timeout_s``.
        api_base: address of a server that has the model and the store, such as
            ``"http://gpu:8000/v1"``; ``model_name`` is its name there.
        api_key: of the server; default: see ``RemoteEngine``. It is no part of ``fields``, and not
            sent to other processes, which take it from their environment.
        recipe: how the model runs in block mode; see ``BlockAttentionEngine``. A ready engine has
            its own.

    Raises:
        ValueError: no model, more than one source of it, what a server has itself, or no recipe
            where ``recipe`` says.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        model_name: Any = None,
        tokenizer_name: Any = None,
        kv_store: KVStore | str | Path | None = None,
        device_map: str = "auto",
        model_kwargs: dict[str, Any] | None = None,
        api_base: str | None = None,
        api_key: str | None = None,
        recipe: RecipeLike = AUTO,
    ) -> None:
        if engine is not None and recipe != AUTO:
            raise ValueError(
                f"Found recipe={str(recipe)!r} beside engine=, which has its own: make the engine "
                "with it, BlockAttentionEngine(model, store, recipe=...)."
            )
        if recipe != AUTO:
            known_digests(recipe, None, "")  # refused now
        has_name = model_name is not None or api_base is not None
        if (engine is None) != has_name:
            raise ValueError(
                "expected one source of the model, either model_name= (or model= with tokenizer=), "
                "or that with a server's address, or engine=; found "
                f"{'both' if has_name else 'none'}"
            )
        is_name = isinstance(model_name, (str, Path, type(None)))
        has_device = device_map != "auto" or "device" in (model_kwargs or {})
        if api_base is not None and not (is_name and kv_store is None and not has_device):
            raise ValueError(
                "a server has its model, device and store itself: with its address, give the "
                "model's name there, and no kv_store, device or loaded model"
            )
        self._engine = engine
        self._api_base = api_base
        self._api_key = api_key
        self._model = str(model_name) if isinstance(model_name, Path) else model_name
        own = (model_kwargs or {}).get("tokenizer")
        self._tokenizer = tokenizer_name if own is None else own
        if self._tokenizer is None and not is_name:
            raise ValueError(
                "a ready model was given without its tokenizer; pass "
                "model_kwargs={'tokenizer': ...}"
            )
        self._kv_store = engine.store if isinstance(engine, BlockAttentionEngine) else kv_store
        self._recipe = str(recipe) if isinstance(recipe, Path) else recipe
        self._device_map = device_map
        self._model_kwargs = dict(model_kwargs or {})
        if "torch_dtype" in self._model_kwargs:  # its name in transformers 4
            self._model_kwargs["dtype"] = self._model_kwargs.pop("torch_dtype")
        self._block_tokenizer: BlockTokenizer | None = None
        self._lock = threading.RLock()
        keeps = self._kv_store is not None or not self._is_local
        self._hints = ReuseHints() if keeps else None
        self._told_of_control_tokens = False

    @property
    def live_parts(self) -> list[str]:
        """What was given as an object in memory, which no name can bring back."""
        live = {
            "engine": self._engine is not None and not (self._model or self._api_base),
            "model": self._model is not None and not isinstance(self._model, str),
            "tokenizer": not isinstance(self._tokenizer, (str, Path, type(None))),
            "kv_store": self._kv_store is not None and _location(self._kv_store) is None,
            "recipe": isinstance(self._recipe, Recipe),
        }
        return [name for name, is_live in live.items() if is_live]

    def fields(self) -> dict[str, Any]:
        """Arguments of a source that loads the same again, as far as names can say it."""
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
            "api_base": self._api_base,
            "recipe": str(self._recipe),
        }

    def asking_for(self, fields: dict[str, Any]) -> EngineSource:
        """A source with these fields in place of its own, and the same key."""
        found = {**self.fields(), **fields}
        if found["recipe"] == str(self._recipe):  # a `Recipe` is more than its text
            found["recipe"] = self._recipe
        return EngineSource(**found, api_key=self._api_key)

    @property
    def _is_local(self) -> bool:
        """Whether the model is, or will be, in this process."""
        return self._api_base is None and isinstance(
            self._engine, (BlockAttentionEngine, type(None))
        )

    @property
    def follows_grammars(self) -> bool:
        """Whether answers can be held to grammars; what a server cannot do, it refuses itself."""
        return not self._is_local or find_spec("llguidance") is not None

    @property
    def lasting_store(self) -> str | None:
        """The store that other processes find too, by its place or its server's; None if it goes
        with this process."""
        if self._api_base is not None:
            return self._api_base
        place = _location(self._kv_store)
        return place if place and lasts(place) else None

    @property
    def storage(self) -> dict[str, str]:
        """Store and namespace of what is encoded, such that others do not have the same."""
        engine = self.engine
        if isinstance(engine, BlockAttentionEngine):
            # A store in memory lives as long as its object.
            passing = f"{type(engine.store).__name__} {id(engine.store)}"
            return {"store": self.lasting_store or passing, "namespace": engine.access.namespace}
        from blockattn_rag.server.client import RemoteEngine

        assert isinstance(engine, RemoteEngine)
        return {"store": engine.base_url, "namespace": engine.info.namespace}

    @property
    def identity(self) -> dict[str, Any]:
        """What answers depend on besides a component's fields: a ready engine's model and recipe;
        of an engine to be loaded, the recipes that it may find."""
        if "engine" in self.live_parts:
            engine = self.engine
            known = {"fingerprint": engine.model.fingerprint, "recipe": engine.recipe.digest}
            if isinstance(engine, BlockAttentionEngine):
                known["kv_dtype"] = engine.kv_dtype
            return known
        if self._api_base is not None:
            return {}
        model = self._model if isinstance(self._model, str) else ""
        return {"recipes": known_digests(self._recipe, _location(self._kv_store), model)}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> EngineSource:
        # Weights and locks are shared, never copied.
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        if live := self.live_parts:
            raise pickle.PicklingError(
                f"this was built from a live {' and '.join(live)}, which cannot be sent to another "
                "process; build it from the name of a model and the directory or address of a store"
            )
        # The store itself, which may have a bound, and not its place alone; and not the API key.
        return partial(EngineSource, **{**self.fields(), "kv_store": self._kv_store}), ()

    @property
    def engine(self) -> Engine:
        """The engine; loads the weights on first use, unless a server has them."""
        with self._lock:
            if self._engine is None and self._api_base is not None:
                from blockattn_rag.server.client import RemoteEngine

                self._engine = RemoteEngine(
                    self._api_base,
                    self._model,
                    self._block_tokenizer or self._tokenizer,
                    api_key=self._api_key,
                    recipe=self._recipe,
                    **self._loading,
                )
            if self._engine is None:
                self._engine = BlockAttentionEngine.from_pretrained(
                    self._model,
                    tokenizer=self._block_tokenizer or self._tokenizer,
                    store=self._kv_store,
                    recipe=self._recipe,
                    **{"device": self._device_map, **self._loading},
                )
            return self._engine

    @property
    def _loading(self) -> dict[str, Any]:
        """``model_kwargs`` for loading."""
        return {k: value for k, value in self._model_kwargs.items() if k != "tokenizer"}

    def noted(self, prompt: BlockPrompt) -> BlockPrompt:
        """The prompt, which is about to be answered; may log a hint."""
        if self._hints is not None:
            self._hints.look_at(prompt)
        return prompt

    def string_spans(self, prompt: str, *, parse_special_tokens: bool) -> list[Span]:
        """A prompt that came as one string, by origin; what in it is a template is unknown.

        Raises:
            SegmentationError: control tokens are to be parsed, and a passage was cut.
        """
        if parse_special_tokens:
            if holds_orphans(prompt):
                raise SegmentationError(
                    "found a passage that a text splitter cut, in a prompt in which control tokens "
                    "are parsed: what it holds could end the turn. Keep passages whole by "
                    "configure(llm) or block_query_engine, or use chat messages"
                )
            return content_spans(prompt, "prompt")
        spans = content_spans(prompt, "conversation")
        if not self._told_of_control_tokens and any(
            self.tokenizer.spells_control_token(span.text)
            for span in spans
            if span.origin == "conversation"
        ):
            self._told_of_control_tokens = True
            logger.warning(
                "a prompt that came as a string holds control tokens of the model. They are taken "
                "as text, since passages and questions may hold them too. If your own prompt "
                "template writes them, pass parse_special_tokens=True (docs/security.md)"
            )
        return spans

    async def agenerate(
        self,
        make_prompt: Callable[[], BlockPrompt],
        options: dict[str, Any],
        group: Group | None = None,
    ) -> Generation:
        """``engine.generate`` for event loops, which neither load the model nor make the prompt."""
        engine = await self._loaded_engine()
        return await engine.agenerate(make_prompt, group=group, **options)

    async def astream(
        self, make_prompt: Callable[[], BlockPrompt], options: dict[str, Any]
    ) -> AsyncGenerator[GenerationChunk, None]:
        """``engine.stream`` for event loops."""
        engine = await self._loaded_engine()
        async with aclosing(engine.astream(make_prompt, **options)) as chunks:
            async for chunk in chunks:
                yield chunk

    def prefetch(self, blocks: Sequence[Block]) -> None:
        """``engine.prefetch``, if the model is loaded: loading it takes longer than any read."""
        if self._engine is not None:
            self._engine.prefetch(blocks)

    async def _loaded_engine(self) -> Engine:
        if self._engine is not None:
            return self._engine
        return await asyncio.to_thread(lambda: self.engine)

    @property
    def tokenizer(self) -> BlockTokenizer:
        """The model's tokenizer, without loading weights."""
        with self._lock:
            if self._engine is not None or self._api_base is not None:
                return self.engine.model.tokenizer
            if self._block_tokenizer is None:
                given = self._tokenizer or self._model
                by_name = isinstance(given, (str, Path))
                self._block_tokenizer = BlockTokenizer(load_tokenizer(given) if by_name else given)
            return self._block_tokenizer

    @property
    def max_context_tokens(self) -> int:
        """Tokens that the model can hold, without loading weights; a server is asked."""
        with self._lock:
            if self._engine is not None or self._api_base is not None:
                return self.engine.model.max_context_tokens
            model = self._model
            return position_limit(load_config(model) if isinstance(model, str) else model.config)


def _location(store: KVStore | str | Path | None) -> str | None:
    """The directory or address of a store; None without one, and for an object in memory."""
    if isinstance(store, (str, Path)):
        return str(store)
    place = getattr(store, "path", None) or getattr(store, "url", None)
    return None if place is None else str(place)
