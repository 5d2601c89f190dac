"""A database folder: Chroma, the KV store, the recipe, and a manifest.

::

    DIR/blockattn.json  manifest: model, embedding, chunk size, recipe and other settings
    DIR/recipe/         recipe that `repair` made for these passages
    DIR/chroma/         embedded Chroma: passages, their embeddings and KV handles
    DIR/kv/             keys and values, unless the manifest names another store
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockattn_rag.app.rag.names import (
    HASHING,
    absolute_embedding,
    check_recipe,
    load_embedding,
)
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
    from blockattn_rag.engine.protocol import Engine

MANIFEST = "blockattn.json"
AUTO = "auto"
VERSION = 2
_EARLIER_STOCK = "head:4"
"""``Manifest.stock`` of databases whose manifest has none."""

_CHROMA, _CHROMA_FILE = "chroma", "chroma.sqlite3"

logger = logging.getLogger("blockattn_rag.app.rag")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Settings of a database.

    Args:
        model: Model that encodes passages. With a server: local name of its tokenizer.
        fingerprint: Fingerprint of the model in the last ingestion.
        embedding: Embedding of the passages.
        collection: Chroma collection.
        chunk_size: Maximum length of a passage in tokens.
        template: Block template of the passages.
        recipe: Recipe of block mode: ``"auto"``, settings such as ``"fast"``, or a folder.
            ``"auto"`` is the folder ``recipe`` of the database, if there is one.
        stock: Settings of ``"auto"`` for a stock model without a recipe. They stay those of the
            first ingestion, because the stored keys and values belong to them.
        namespace: Namespace of the keys and values in the store.
        dtype: Type of the model's weights.
        kv_dtype: Type of newly stored keys and values.
        store: Address or absolute path of the store. None: the folder ``kv`` of the database.
        server: Address of the server with the model and the store. None: this process.
    """

    model: str
    fingerprint: str
    embedding: str = HASHING
    collection: str = "passages"
    chunk_size: int = 512
    template: dict[str, str] = field(default_factory=lambda: asdict(BLANK_LINE))
    recipe: str = AUTO
    stock: str = STOCK
    namespace: str = ""
    dtype: str = AUTO
    kv_dtype: str = "model"
    store: str | None = None
    server: str | None = None
    version: int = VERSION

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder. None: the folder has no manifest."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if (found := fields.get("version")) != VERSION:
                raise DatabaseError(
                    f"{path} has version {found}, expected {VERSION}; delete the folder, or use "
                    "a new one"
                )
            check_namespace(fields.get("namespace", ""))
            if (kind := fields.get("kv_dtype", "model")) not in ("model", "int8"):
                raise ValueError(f"kv_dtype is {kind!r}, expected 'model' or 'int8'")
            if not isinstance(recipe := fields.get("recipe", AUTO), str):
                raise ValueError(f"recipe is {recipe!r}, expected a string")
            stock = fields.setdefault("stock", _EARLIER_STOCK)
            if not isinstance(stock, str) or RecipeOutline.parsed(stock) is None:
                raise ValueError(f"stock is {stock!r}, expected {TEXT_FORMS}")
            return cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise DatabaseError(f"{path} is damaged ({error}); ingest into a new folder") from error


@dataclass(frozen=True, slots=True)
class Database:
    """An open database: folder, manifest, the engine that answers, and the embedding."""

    path: Path
    manifest: Manifest
    engine: Engine
    embedding: BaseEmbedding

    @classmethod
    def create(cls, path: Path, wanted: Manifest, *, remembers: bool = True) -> Database:
        """Open a folder for ingestion, and create it if it does not exist.

        Args:
            wanted: The settings. The fingerprint is taken from the loaded model.
            remembers: See :meth:`open`.

        Raises:
            DatabaseError: The folder has passages with another embedding.
            FileNotFoundError: The embedding is a folder that does not exist.
        """
        old = Manifest.read(path)
        if Path(wanted.model).exists():
            wanted = replace(wanted, model=str(Path(wanted.model).resolve()))
        wanted = replace(wanted, embedding=absolute_embedding(wanted.embedding))
        is_other = old and (old.embedding, old.template) != (wanted.embedding, wanted.template)
        if old and is_other and has_passages(path, old):
            raise DatabaseError(
                f"{path} was made with embedding {old.embedding!r}, found {wanted.embedding!r}: "
                "use the same embedding, or ingest into a new folder"
            )
        embedding = load_embedding(wanted.embedding)
        # A server has its own recipe, so the recipe in the manifest does not apply.
        used = replace(wanted, recipe=AUTO) if wanted.server else wanted
        engine = _load_engine(path, used, remembers)
        if old and old.model != wanted.model:
            names = (path, old.model, wanted.model)
            logger.warning("%s was made with %s and now uses %s", *names)
        manifest = replace(wanted, fingerprint=engine.model.fingerprint)
        path.mkdir(parents=True, exist_ok=True)
        if old and is_other:
            _delete_collection(path, old)
        write_json(path / MANIFEST, asdict(manifest))
        return cls(path, manifest, engine, embedding)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        model: str | None = None,
        recipe: str | None = None,
        remembers: bool = True,
    ) -> Database:
        """Open a folder for questions.

        Any model can answer, because handles do not depend on the model. If another model encoded
        the passages, they are computed again on first use, and stored.

        Args:
            model: Model to use in this process, instead of the database's model.
            recipe: Recipe to use instead of the database's recipe.
            remembers: Whether blocks and the ends of conversations stay in memory for later
                answers. Pass False to time answers as in a new process.

        Raises:
            DatabaseError: The folder is not a database.
        """
        manifest = require_manifest(path)
        server = None if model else manifest.server
        wanted = replace(
            manifest,
            model=model or manifest.model,
            server=server,
            recipe=recipe or (AUTO if server else manifest.recipe),
        )
        embedding = load_embedding(manifest.embedding)
        engine = _load_engine(path, wanted, remembers)
        if engine.model.fingerprint != manifest.fingerprint:
            logger.warning(
                "%s was encoded by %s in another state (weights, dtype, tokenizer, model, or "
                "version of this package): passages are computed when first used. To encode all "
                "of them now, run `blockattn-rag ingest`",
                path, manifest.model,
            )  # fmt: skip
        used = engine.recipe
        is_stock = not isinstance(used, RecipeOutline) and used.source == STOCK_SOURCE
        if is_stock and manifest.stock != STOCK:
            logger.warning(
                "%s was ingested with the recipe %s, and keeps it; new databases use %s. To use "
                "that here, run `blockattn-rag ingest PATH --db %s --recipe auto`",
                path, used, STOCK, path,
            )  # fmt: skip
        return cls(path, manifest, engine, embedding)

    def require_passages(self) -> None:
        """Raise ``DatabaseError`` if the database has no passages."""
        if not self.collection.count():
            raise DatabaseError(
                f"{self.path} contains no passages; run `blockattn-rag ingest PATH --db "
                f"{self.path}`"
            )

    @property
    def local_engine(self) -> BlockAttentionEngine:
        """The engine, if its model runs in this process.

        Raises:
            DatabaseError: The model runs on a server.
        """
        from blockattn_rag.engine.engine import BlockAttentionEngine

        if not isinstance(self.engine, BlockAttentionEngine):
            raise DatabaseError(
                f"{self.path} uses the server {self.manifest.server}, but this command needs the "
                "model in this process: pass a model with --model"
            )
        return self.engine

    def use_own_recipe(self) -> None:
        """Use the recipe in the database's folder from now on."""
        if self.manifest.recipe != AUTO:
            write_json(self.path / MANIFEST, asdict(replace(self.manifest, recipe=AUTO)))

    @property
    def template(self) -> BlockTemplate:
        return BlockTemplate(**self.manifest.template)

    @property
    def client(self) -> ClientAPI:
        return chroma_client(self.path / _CHROMA, create=True)

    @property
    def collection(self) -> Collection:
        """The Chroma collection. Callers pass the vectors, and Chroma computes no embeddings."""
        return self.client.get_or_create_collection(
            self.manifest.collection,
            embedding_function=None,
            # With Chroma's default of 100 candidates, the results of small collections vary.
            configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
        )


def has_passages(path: Path, manifest: Manifest) -> bool:
    """Whether a database has passages. A failed ingestion may leave it empty."""
    return _has_collection(path, manifest) and stored_collection(path).count() > 0


def _delete_collection(path: Path, manifest: Manifest) -> None:
    """Delete an empty collection, because it would keep the dimension of its former vectors."""
    if _has_collection(path, manifest):
        chroma_client(path / _CHROMA).delete_collection(manifest.collection)


def _has_collection(path: Path, manifest: Manifest) -> bool:
    if not (path / _CHROMA / _CHROMA_FILE).is_file():
        return False
    found = chroma_client(path / _CHROMA).list_collections()
    return manifest.collection in [one.name for one in found]


def stored_collection(path: Path) -> Collection:
    """The Chroma collection of a database, without loading its model.

    Raises:
        DatabaseError: The folder is not a database, or has no Chroma.
    """
    name = require_manifest(path).collection
    return chroma_client(path / _CHROMA).get_collection(name)


def require_manifest(path: Path) -> Manifest:
    """Read the manifest of a folder, which must be a database."""
    if (manifest := Manifest.read(path)) is None:
        raise DatabaseError(
            f"{path} is not a database (it has no {MANIFEST}); create one with `blockattn-rag "
            f"ingest PATH --db {path}`"
        )
    return manifest


def chroma_client(path: Path, *, create: bool = False) -> ClientAPI:
    """Open embedded Chroma in a folder, with telemetry off.

    Raises:
        DatabaseError: The folder has no Chroma database, and ``create`` is False.
    """
    if not create and not (path / _CHROMA_FILE).is_file():
        raise DatabaseError(f"{path} has no Chroma database (expected the file {_CHROMA_FILE})")
    import chromadb
    from chromadb.config import Settings

    path.mkdir(parents=True, exist_ok=True)
    return chromadb.PersistentClient(str(path), settings=Settings(anonymized_telemetry=False))


def _load_engine(path: Path, wanted: Manifest, remembers: bool) -> Engine:
    check_recipe(wanted.recipe)
    if wanted.server is not None:
        from blockattn_rag.server.client import RemoteEngine

        return RemoteEngine(wanted.server, tokenizer=wanted.model, recipe=wanted.recipe)
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.kv.quantization import check_kv_dtype
    from blockattn_rag.store import DEFAULT_RESIDENT_BYTES

    started = time.perf_counter()
    engine = BlockAttentionEngine.from_pretrained(
        wanted.model,
        store=wanted.store or path / "kv",
        dtype=wanted.dtype,
        namespace=wanted.namespace,
        kv_dtype=check_kv_dtype(wanted.kv_dtype),
        recipe=wanted.recipe,
        folder=path,
        stock=wanted.stock,
        resident_bytes=DEFAULT_RESIDENT_BYTES if remembers else 0,
    )
    model = engine.model
    seconds = time.perf_counter() - started
    logger.info("Loaded %s in %.2f s: %s on %s", model.name, seconds, model.dtype, model.device)
    logger.info("Recipe: %s; store: %s; model: %s", engine.recipe, engine.store, model.fingerprint)
    return engine
