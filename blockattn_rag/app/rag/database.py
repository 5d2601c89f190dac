"""Database folder: Chroma, the KV store, the recipe, and a manifest.

::

    DIR/blockattn.json  manifest: model, embedding, chunk size, recipe and other settings
    DIR/recipe/         recipe that `repair` made for these passages
    DIR/chroma/         embedded Chroma: passages, their embeddings and KV handles
    DIR/kv/             keys and values, unless the manifest names another store
    DIR/journal/        passages that servers have stored, until an ingestion is complete
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from blockattn_rag.app.rag.names import HASHING, absolute_embedding, check_recipe, load_embedding
from blockattn_rag.engine.outline import STOCK, STOCK_SOURCE, TEXT_FORMS, RecipeOutline
from blockattn_rag.errors import DatabaseError
from blockattn_rag.files import write_json
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store.namespaces import check_namespace

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.prompts.tokenization import BlockTokenizer
    from blockattn_rag.server.client import ServerClient

MANIFEST = "blockattn.json"
JOURNAL = "journal"
AUTO_SETTING = "auto"
MANIFEST_VERSION = 2
_EARLIER_STOCK = "head:4"
"""``Manifest.stock`` for databases whose manifest has no such field."""

_CHROMA, _CHROMA_FILE = "chroma", "chroma.sqlite3"

logger = logging.getLogger("blockattn_rag.app.rag")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Settings of a database, saved as ``blockattn.json``.

    Args:
        model: Model that encodes passages. With a server: local name of its tokenizer.
        chunk_size: Maximum length of a passage in tokens.
        recipe: Recipe for block mode: ``"auto"``, settings such as ``"fast"``, or a folder.
            ``"auto"`` uses the database's folder ``recipe``, if it exists.
        stock: Settings that ``"auto"`` uses for a stock model without a recipe. Only set by the
            first ingestion and by ``--recipe auto``, because stored keys and values depend on them.
        store: Address or absolute path of the store. None: the folder ``kv`` of the database.
        servers: Addresses of servers with the model and the store. Empty: use this process.
    """

    model: str
    fingerprint: str = ""
    embedding: str = HASHING
    collection: str = "passages"
    chunk_size: int = 512
    template: dict[str, str] = field(default_factory=lambda: asdict(BLANK_LINE))
    recipe: str = AUTO_SETTING
    stock: str = STOCK
    namespace: str = ""
    dtype: str = AUTO_SETTING
    kv_dtype: str = "model"
    store: str | None = None
    servers: list[str] = field(default_factory=list)
    version: int = MANIFEST_VERSION

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a folder's manifest. Returns None if absent, and raises DatabaseError if invalid."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if (version := fields.get("version")) != MANIFEST_VERSION:
                raise DatabaseError(
                    f"{path} has version {version}, expected {MANIFEST_VERSION}: use a new folder"
                )
            check_namespace(fields.get("namespace", ""))
            if (kind := fields.get("kv_dtype", "model")) not in ("model", "int8"):
                raise ValueError(f"Found kv_dtype {kind!r}, expected 'model' or 'int8'")
            if not isinstance(recipe := fields.get("recipe", AUTO_SETTING), str):
                raise ValueError(f"Found recipe {recipe!r}, expected a string")
            stock = fields.setdefault("stock", _EARLIER_STOCK)
            if not isinstance(stock, str) or RecipeOutline.parsed(stock) is None:
                raise ValueError(f"Found stock {stock!r}, expected {TEXT_FORMS}")
            if server := fields.pop("server", None):
                # Databases from previous versions have this field.
                fields["servers"] = [server]
            return cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise DatabaseError(f"{path} is damaged ({error}); ingest into a new folder") from error


@dataclass(frozen=True)
class Database:
    """Open database. ``model``: Engine in this process, or client for a server."""

    path: Path
    manifest: Manifest
    model: BlockAttentionEngine | ServerClient
    embedding: BaseEmbedding

    @classmethod
    def create(cls, path: Path, settings: Manifest, *, remembers: bool = True) -> Database:
        """Open a database folder for ingestion, creating it if needed, and save its settings."""
        old = Manifest.read(path)
        if Path(settings.model).exists():
            settings = replace(settings, model=str(Path(settings.model).resolve()))
        settings = replace(settings, embedding=absolute_embedding(settings.embedding))
        is_other = old and (old.embedding, old.template) != (settings.embedding, settings.template)
        if old and is_other and has_passages(path, old):
            raise DatabaseError(
                f"{path} was made with embedding {old.embedding!r}, found {settings.embedding!r}: "
                "use the same embedding, or ingest into a new folder"
            )
        embedding = load_embedding(settings.embedding)
        # A server has a recipe, so the manifest's recipe does not apply.
        used = replace(settings, recipe=AUTO_SETTING) if settings.servers else settings
        model = _load_model(path, used, remembers)
        if old and old.model != settings.model:
            names = (path, old.model, settings.model)
            logger.warning("%s was made with %s and now uses %s", *names)
        loaded = cls(path, settings, model, embedding)
        database = replace(loaded, manifest=replace(settings, fingerprint=loaded.fingerprint))
        path.mkdir(parents=True, exist_ok=True)
        if old and is_other and _has_collection(path, old):
            # The empty collection would keep the dimension of its previous vectors.
            chroma_client(path / _CHROMA).delete_collection(old.collection)
        write_json(path / MANIFEST, asdict(database.manifest))
        return database

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        model: str | None = None,
        recipe: str | None = None,
        remembers: bool = True,
    ) -> Database:
        """Open a database folder for questions.

        Any model can answer, because handles do not depend on the model. If the passages were
        encoded by another model, they are encoded again on first use, and stored.

        Args:
            model, recipe: Override the database's. A model runs in this process, not on a server.
            remembers: Whether to cache blocks and earlier turns in memory for later answers. Pass
                False to measure answers as in a new process.
        """
        manifest = require_manifest(path)
        servers = [] if model else manifest.servers
        settings = replace(
            manifest,
            model=model or manifest.model,
            servers=servers,
            recipe=recipe or (AUTO_SETTING if servers else manifest.recipe),
        )
        embedding = load_embedding(manifest.embedding)
        database = cls(path, manifest, _load_model(path, settings, remembers), embedding)
        if database.fingerprint != manifest.fingerprint:
            logger.warning(
                "%s was encoded by %s, but the model, its weights, dtype or tokenizer, or this "
                "package has changed: passages will be encoded again on first use. To encode all "
                "of them now, run `blockattn-rag ingest`",
                path, manifest.model,
            )  # fmt: skip
        recipe_of = None if database.server else database.engine.recipe
        if recipe_of and recipe_of.source == STOCK_SOURCE and manifest.stock != STOCK:
            logger.warning(
                "%s was ingested with the recipe %s, and continues to use it; new databases use "
                "%s. To use that here, run `blockattn-rag ingest PATH --db %s --recipe auto`",
                path, recipe_of, STOCK, path,
            )  # fmt: skip
        return database

    def require_passages(self) -> None:
        if not self.collection.count():
            raise DatabaseError(
                f"{self.path} contains no passages; run `blockattn-rag ingest PATH --db "
                f"{self.path}`"
            )

    @property
    def server(self) -> ServerClient | None:
        """Client for the server that answers, or None if the model runs in this process."""
        from blockattn_rag.engine.engine import BlockAttentionEngine

        return None if isinstance(self.model, BlockAttentionEngine) else self.model

    @property
    def engine(self) -> BlockAttentionEngine:
        """Engine in this process. Raises DatabaseError if the model runs on a server."""
        if (server := self.server) is not None:
            raise DatabaseError(
                f"{self.path} uses the server {server.url}, but this command requires a model in "
                "this process: pass --model"
            )
        return cast("BlockAttentionEngine", self.model)

    @cached_property
    def tokenizer(self) -> BlockTokenizer:
        """Tokenizer of the model. With a server, the local tokenizer named in the manifest."""
        from blockattn_rag.model.loading import load_tokenizer
        from blockattn_rag.prompts.tokenization import BlockTokenizer

        if self.server is None:
            return self.engine.model.tokenizer
        return BlockTokenizer(load_tokenizer(self.manifest.model))

    @property
    def fingerprint(self) -> str:
        return self.server.info.fingerprint if self.server else self.engine.model.fingerprint

    @property
    def max_context_tokens(self) -> int:
        return self.server.info.max_tokens if self.server else self.engine.model.max_context_tokens

    @property
    def recipe(self) -> str:
        return str(self.server.info.recipe if self.server else self.engine.recipe)

    def use_own_recipe(self) -> None:
        if self.manifest.recipe != AUTO_SETTING:
            write_json(self.path / MANIFEST, asdict(replace(self.manifest, recipe=AUTO_SETTING)))

    @property
    def template(self) -> BlockTemplate:
        return BlockTemplate(**self.manifest.template)

    @property
    def client(self) -> ClientAPI:
        return chroma_client(self.path / _CHROMA, create=True)

    @property
    def collection(self) -> Collection:
        """Chroma collection. Callers pass vectors, so Chroma computes no embeddings."""
        return self.client.get_or_create_collection(
            self.manifest.collection,
            embedding_function=None,
            # With Chroma's default of 100 candidates, results in small collections vary.
            configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
        )


def has_passages(path: Path, manifest: Manifest) -> bool:
    return _has_collection(path, manifest) and stored_collection(path).count() > 0


def _has_collection(path: Path, manifest: Manifest) -> bool:
    chroma = path / _CHROMA
    return (chroma / _CHROMA_FILE).is_file() and manifest.collection in {
        collection.name for collection in chroma_client(chroma).list_collections()
    }


def stored_collection(path: Path) -> Collection:
    """Return a database's Chroma collection without loading the model."""
    name = require_manifest(path).collection
    return chroma_client(path / _CHROMA).get_collection(name)


def require_manifest(path: Path) -> Manifest:
    if (manifest := Manifest.read(path)) is None:
        raise DatabaseError(
            f"{path} is not a database (it has no {MANIFEST}); create one with `blockattn-rag "
            f"ingest PATH --db {path}`"
        )
    return manifest


def chroma_client(path: Path, *, create: bool = False) -> ClientAPI:
    """Open embedded Chroma in a folder, without telemetry. ``create``: Create it if needed."""
    if not create and not (path / _CHROMA_FILE).is_file():
        raise DatabaseError(f"{path} has no Chroma database (expected the file {_CHROMA_FILE})")
    import chromadb
    from chromadb.config import Settings

    path.mkdir(parents=True, exist_ok=True)
    return chromadb.PersistentClient(str(path), settings=Settings(anonymized_telemetry=False))


def _load_model(
    path: Path, settings: Manifest, remembers: bool
) -> BlockAttentionEngine | ServerClient:
    check_recipe(settings.recipe)
    if settings.servers:
        from blockattn_rag.server import ServerClient
        from blockattn_rag.server.pool import first_reachable

        client = first_reachable([*map(ServerClient, settings.servers)])
        if settings.recipe not in (AUTO_SETTING, str(client.info.recipe)):
            raise DatabaseError(
                f"Cannot use the recipe {settings.recipe!r}, because {client.url} already has one, "
                f"{client.info.recipe}; remove the recipe"
            )
        return client
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.kv.quantization import check_kv_dtype
    from blockattn_rag.store import DEFAULT_RESIDENT_BYTES

    started = time.perf_counter()
    engine = BlockAttentionEngine.from_pretrained(
        settings.model,
        store=settings.store or path / "kv",
        dtype=settings.dtype,
        namespace=settings.namespace,
        kv_dtype=check_kv_dtype(settings.kv_dtype),
        recipe=settings.recipe,
        folder=path,
        stock=settings.stock,
        resident_bytes=DEFAULT_RESIDENT_BYTES if remembers else 0,
    )
    model = engine.model
    seconds = time.perf_counter() - started
    logger.info("Loaded %s in %.2f s: %s on %s", model.name, seconds, model.dtype, model.device)
    logger.info("Recipe: %s; store: %s; model: %s", engine.recipe, engine.store, model.fingerprint)
    return engine
