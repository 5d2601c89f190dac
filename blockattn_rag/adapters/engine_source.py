"""Source of an adapter's engine: an existing engine, or the arguments for loading one."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockattn_rag.adapters.hints import ReuseHints
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, known_digests
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import SegmentationError
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.markers import content_spans, holds_orphans
from blockattn_rag.prompts.recognition import Recognize
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.store import KVStore
from blockattn_rag.store.passage_index import PassageIndex
from blockattn_rag.store.urls import lasts

logger = logging.getLogger("blockattn_rag")


def source_of(llm: Any, expected: str, *others: Any) -> EngineSource:
    """Return the engine source of the LLM that a component received as ``llm=``.

    Args:
        llm: Value of ``llm=``.
        expected: Class name of the usual value, for the error message.
        others: Arguments that cannot be combined with ``llm=``.

    Raises:
        ValueError: One of ``others`` is given too.
        TypeError: ``llm`` is not an LLM of this package.
    """
    if any(value is not None for value in others):
        raise ValueError("Give either llm=, or the model, store and recipe, not both")
    source = getattr(llm, "source", None)
    if not isinstance(source, EngineSource):
        raise TypeError(
            f"llm= must be the LLM that generates the answers, such as {expected}(...); found "
            f"{type(llm).__name__} {llm!r:.60}. Pass a model's name as model="
        )
    return source


class EngineSource:
    """An existing engine, or the arguments for loading one.

    Language models load it when they are created (``load``), ingestion steps on first use. Copies
    of a component share one source, and therefore the weights.

    Args:
        engine: An existing engine, instead of all other arguments.
        model_name: Name or path of a model, or a loaded transformers model.
        tokenizer_name: A transformers tokenizer, or its name or path. Default: the tokenizer of
            the model.
        kv_store: A store, or a location that ``store.open_store`` accepts, such as a directory or
            ``"s3://bucket/kv"``. Default: memory.
        device_map: A torch device, or ``"auto"``.
        model_kwargs: Further arguments for loading the model, including ``tokenizer``. With
            ``api_base``: arguments of ``RemoteEngine``, such as ``timeout_s``.
        api_base: Address of a server with the model and the store, such as
            ``"http://gpu:8000/v1"``; ``model_name`` is its name there.
        api_key: API key of the server. Default: see ``RemoteEngine``. The key is neither part of
            ``fields`` nor pickled. Other processes read it from their environment.
        recipe: How the model runs in block mode; see ``BlockAttentionEngine``.

    Raises:
        ValueError: No model or several models are given, an argument conflicts with a server or an
            existing engine, or the recipe is not found.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
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
                f"Found recipe={str(recipe)!r} and engine=, which has its own recipe. Create the "
                "engine with the recipe: BlockAttentionEngine(model, store, recipe=...)."
            )
        if recipe != AUTO:
            known_digests(recipe, None, "")  # raises early if the recipe does not exist
        has_name = model_name is not None or api_base is not None
        if (engine is None) != has_name:
            raise ValueError(
                "Expected either engine= or a model: model_name= (or model= with tokenizer=), "
                f"with or without the address of a server; found "
                f"{'both' if has_name else 'none'}"
            )
        is_name = isinstance(model_name, (str, Path, type(None)))
        has_device = device_map != "auto" or "device" in (model_kwargs or {})
        if api_base is not None and not (is_name and kv_store is None and not has_device):
            raise ValueError(
                "A server has its own model, device and store: with the address of a server, pass "
                "the name of its model, and no kv_store, device or loaded model"
            )
        self._engine = engine
        self._api_base = api_base
        self._api_key = api_key
        self._model = str(model_name) if isinstance(model_name, Path) else model_name
        own = (model_kwargs or {}).get("tokenizer")
        self._tokenizer = tokenizer_name if own is None else own
        if self._tokenizer is None and not is_name:
            raise ValueError(
                "Found a loaded model without its tokenizer; pass model_kwargs={'tokenizer': ...}"
            )
        self._kv_store = engine.store if isinstance(engine, BlockAttentionEngine) else kv_store
        self._recipe = str(recipe) if isinstance(recipe, Path) else recipe
        self._device_map = device_map
        self._model_kwargs = dict(model_kwargs or {})
        if "torch_dtype" in self._model_kwargs:  # the name of dtype in transformers 4
            self._model_kwargs["dtype"] = self._model_kwargs.pop("torch_dtype")
        self._lock = threading.RLock()
        keeps = self._kv_store is not None or not self._is_local
        self._hints = ReuseHints() if keeps else None
        self._has_warned = False

    @property
    def live_parts(self) -> list[str]:
        """Names of arguments that are live objects, which another process cannot load by name."""
        live = {
            "engine": self._engine is not None and not (self._model or self._api_base),
            "model": self._model is not None and not isinstance(self._model, str),
            "tokenizer": not isinstance(self._tokenizer, (str, Path, type(None))),
            "kv_store": self._kv_store is not None and _location(self._kv_store) is None,
            "recipe": isinstance(self._recipe, Recipe),
        }
        return [name for name, is_live in live.items() if is_live]

    def fields(self) -> dict[str, Any]:
        """Arguments that create an equal source, without live objects."""
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
        """A copy of this source with these fields changed, and the same API key."""
        found = {**self.fields(), **fields}
        if found["recipe"] == str(self._recipe):  # keeps a `Recipe` object
            found["recipe"] = self._recipe
        return EngineSource(**found, api_key=self._api_key)

    @property
    def _is_local(self) -> bool:
        """Whether the model runs in this process."""
        return self._api_base is None and isinstance(
            self._engine, (BlockAttentionEngine, type(None))
        )

    @property
    def follows_grammars(self) -> bool:
        """Whether grammars can constrain answers. A server checks its own support."""
        return not self._is_local or find_spec("llguidance") is not None

    @property
    def lasting_store(self) -> str | None:
        """Location of a store that other processes can open.

        None: the store exists in this process only.
        """
        if self._api_base is not None:
            return self._api_base
        place = _location(self._kv_store)
        return place if place and lasts(place) else None

    @property
    def storage(self) -> dict[str, str]:
        """Identity of the store and namespace in which passages are encoded."""
        engine = self.engine
        if isinstance(engine, BlockAttentionEngine):
            temporary = f"{type(engine.store).__name__} {id(engine.store)}"
            return {"store": self.lasting_store or temporary, "namespace": engine.access.namespace}
        from blockattn_rag.server.client import RemoteEngine

        assert isinstance(engine, RemoteEngine)
        return {"store": engine.base_url, "namespace": engine.info.namespace}

    @property
    def identity(self) -> dict[str, Any]:
        """What answers depend on in addition to a component's fields.

        For an existing engine: its model, recipe and KV dtype. Otherwise: the recipes that an
        engine may find when it is loaded.
        """
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
                f"This was built from a live {' and '.join(live)}, which cannot be sent to another "
                "process; pass the model by name, and the store as a directory or an address"
            )
        # Sends the store itself, which may have a size limit, and never the API key.
        return partial(EngineSource, **{**self.fields(), "kv_store": self._kv_store}), ()

    def load(self) -> None:
        """Load the model, unless a server has it, so that the first question is as fast as others.

        An existing engine stays unchanged.
        """
        if self._engine is None and self._is_local:
            model = self.engine.model
            assert isinstance(model, BlockModel)
            # Each is measured on its first access, which takes as long as several answers.
            _ = (model.fingerprint, model.rules, model.graph_runner, model.has_causal_kernel)

    @property
    def engine(self) -> Engine:
        """The engine. The first use loads the weights, unless a server has them."""
        with self._lock:
            if self._engine is None and self._api_base is not None:
                from blockattn_rag.server.client import RemoteEngine

                self._engine = RemoteEngine(
                    self._api_base,
                    self._model,
                    self._tokenizer,
                    api_key=self._api_key,
                    recipe=self._recipe,
                    **self._loading,
                )
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
        """Return the prompt unchanged. Logs a hint if it cannot reuse passages (``ReuseHints``)."""
        if self._hints is not None:
            self._hints.look_at(prompt)
        return prompt

    def check_recognizes(self) -> None:
        """Raise ValueError if the engine cannot recognize passages in plain text."""
        if not self._is_local:
            raise ValueError(
                "recognize=True needs the model in this process. A server recognizes passages by "
                "itself: start it with --recognize, and use its OpenAI routes"
            )
        if isinstance(self._kv_store, KVStore):
            PassageIndex(self._kv_store)

    def prompt_of(
        self, spans: Iterable[Span], template: BlockTemplate, *, recognize: Recognize = False
    ) -> BlockPrompt:
        """Create a prompt from spans.

        Args:
            template: Text around each passage.
            recognize: Whether to also find passages of the store in text without markers, and in
                system messages. The first such prompt loads the model.
        """
        if recognize:
            engine = self.engine
            assert isinstance(engine, BlockAttentionEngine)  # see check_recognizes
            in_system = recognize == "system"
            spans = engine.passages.split(spans, engine.access, in_system=in_system)
        return BlockPrompt.from_spans(spans, template)

    def string_spans(self, prompt: str, *, parse_special_tokens: bool) -> list[Span]:
        """Split a prompt string into spans by origin.

        Args:
            prompt: String with block markers around passages.
            parse_special_tokens: Whether control tokens outside of passages are parsed.

        Raises:
            SegmentationError: Control tokens are parsed, and a passage was cut.
        """
        if parse_special_tokens:
            if holds_orphans(prompt):
                raise SegmentationError(
                    "Found a passage that a text splitter cut, in a prompt whose control tokens "
                    "are parsed: control tokens in the passage could end the turn. Keep passages "
                    "whole with configure(llm) or block_query_engine, or use chat messages"
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
                "because passages and questions may contain them too. If your prompt template "
                "writes them, pass parse_special_tokens=True (docs/security.md)"
            )
        return spans

    async def loaded_engine(self) -> Engine:
        """``engine`` for event loops: the model is loaded in another thread."""
        if self._engine is not None:
            return self._engine
        return await asyncio.to_thread(lambda: self.engine)

    @property
    def tokenizer(self) -> BlockTokenizer:
        """Tokenizer of the model."""
        return self.engine.model.tokenizer

    @property
    def max_context_tokens(self) -> int:
        """Context window of the model, in tokens."""
        return self.engine.model.max_context_tokens


def _location(store: KVStore | str | Path | None) -> str | None:
    """Directory or address of a store. None: there is no store, or it is only in memory."""
    if isinstance(store, (str, Path)):
        return str(store)
    place = getattr(store, "path", None) or getattr(store, "url", None)
    return None if place is None else str(place)
