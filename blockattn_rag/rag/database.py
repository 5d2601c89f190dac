"""A database folder: Chroma, the KV store, and a note of what both were made with.

::

    DIR/blockattn.json    model, embedding, chunk size, collection, block template
    DIR/calibration.json  what `calibrate` found for these passages, by model
    DIR/chroma/           embedded Chroma: passages, their embeddings and KV handles
    DIR/kv/               DirectoryStore: keys and values, unless the note names another store
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import blockattn_rag.llama_index as adapter
from blockattn_rag.errors import DatabaseError
from blockattn_rag.files.atomic import write_json
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.sinks import NO_SINK, check_sink
from blockattn_rag.rag.model_names import loading
from blockattn_rag.store.namespaces import check_namespace

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.engine.protocol import Engine

MANIFEST = "blockattn.json"
HASHING = "hashing"
VERSION = 1

logger = logging.getLogger("blockattn_rag.rag")
"""What users should know of a database that serves them all the same."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a database was made with. ``fingerprint``: of the model that encoded last; ``sink``:
    what it encoded passages after, or what a calibration of it chose since, and of one that is
    wanted empty for what suits the model; ``namespace``: of their keys and values in the store;
    ``kv_dtype``: what passages are kept in that are computed from now on; ``store``: where these
    are, an address or whole path (``store.open_store``), None for the folder ``kv`` of the
    database; ``server``: address of the server that has the model and the store, None for this
    process, and ``model`` is then the name of the tokenizer here."""

    model: str
    fingerprint: str
    embedding: str = HASHING
    collection: str = "passages"
    chunk_size: int = 512
    template: dict[str, str] = field(default_factory=lambda: asdict(BLANK_LINE))
    sink: str = ""
    namespace: str = ""
    kv_dtype: str = "model"
    store: str | None = None
    server: str | None = None
    version: int = VERSION

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The folder's manifest, or None if it has none."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if (found := fields.get("version")) != VERSION:
                raise DatabaseError(
                    f"{path} is of version {found}, expected {VERSION}; ingest into a new folder"
                )
            check_sink(fields.setdefault("sink", NO_SINK))
            check_namespace(fields.get("namespace", ""))
            if (kind := fields.get("kv_dtype", "model")) not in ("model", "int8"):
                raise ValueError(f"kv_dtype {kind!r}")
            return cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise DatabaseError(f"{path} is damaged ({error}); ingest into a new folder") from error


@dataclass(frozen=True, slots=True)
class Database:
    """An open database: its folder, its manifest, and the engine that serves it."""

    path: Path
    manifest: Manifest
    engine: Engine

    @classmethod
    def create(
        cls, path: Path, wanted: Manifest, *, device: str = "auto", dtype: str = "auto"
    ) -> Database:
        """Open a folder for ingestion; make it if it does not exist.

        ``wanted.fingerprint`` is filled in from the loaded model, and the sink from its calibration
        if the passages were another model's so far, or where none is wanted, from its fine-tuning.

        Raises:
            DatabaseError: the folder was embedded by another embedding: its vectors do not compare.
        """
        old = Manifest.read(path)
        if Path(wanted.model).exists():
            wanted = replace(wanted, model=str(Path(wanted.model).resolve()))
        if old and (old.embedding, old.template) != (wanted.embedding, wanted.template):
            raise DatabaseError(
                f"{path} was made with embedding {old.embedding!r}, found {wanted.embedding!r}: "
                "use the same, or ingest into a new folder"
            )
        engine = _load_engine(path, wanted, device, dtype)
        engine = _with_sink(path, engine, old, wanted.sink)
        if old and old.model != wanted.model:
            names = (path, old.model, wanted.model)
            logger.warning("%s was made with %s; from now on it is %s's", *names)
        fingerprint, sink = engine.model.fingerprint, engine.defaults.sink
        manifest = replace(wanted, fingerprint=fingerprint, sink=sink)
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / MANIFEST, asdict(manifest))
        return cls(path, manifest, engine)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        model: str | None = None,
        server: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> Database:
        """Open a folder for questions, with the model that encoded it or with another one, which
        may be a server's.

        Handles hold no model identity: another model computes the passages anew, and stores them.

        Raises:
            DatabaseError: the folder is no database.
        """
        manifest = require_manifest(path)
        server = server or (None if model else manifest.server)
        wanted = replace(manifest, model=model or manifest.model, server=server)
        loaded = _load_engine(path, wanted, device, dtype)
        engine = _with_sink(path, loaded, manifest, manifest.sink)
        if engine.model.fingerprint != manifest.fingerprint:
            logger.warning(
                "%s was encoded by %s in another state (weights, dtype, tokenizer, model, or "
                "version of this package): passages are computed when first used. "
                "`blockattn-rag ingest` encodes them all",
                path, manifest.model,
            )  # fmt: skip
        return cls(path, manifest, engine)

    @property
    def local_engine(self) -> BlockAttentionEngine:
        """The engine, which has its model in this process.

        Raises:
            DatabaseError: a server has it.
        """
        from blockattn_rag.engine.engine import BlockAttentionEngine

        if not isinstance(self.engine, BlockAttentionEngine):
            raise DatabaseError(
                f"{self.path} is answered by {self.manifest.server}, and this needs the model in "
                "this process; name one by --model"
            )
        return self.engine

    @property
    def calibration_path(self) -> Path:
        """Where its calibrations are, or would be; a store may be shared, or be no folder."""
        return _calibration_path(self.path)

    def note_sink(self, sink: str) -> bool:
        """Note that passages are encoded after this sink from now on, if the database is the
        engine's model's; whether that is a change."""
        is_own = self.engine.model.fingerprint == self.manifest.fingerprint
        if not is_own or sink == self.manifest.sink:
            return False
        write_json(self.path / MANIFEST, asdict(replace(self.manifest, sink=sink)))
        return True

    @property
    def template(self) -> BlockTemplate:
        return BlockTemplate(**self.manifest.template)

    @property
    def client(self) -> ClientAPI:
        return chroma_client(self.path / "chroma", create=True)

    @property
    def collection(self) -> Collection:
        """The Chroma collection. Vectors always come with the call: Chroma embeds nothing."""
        return self.client.get_or_create_collection(
            self.manifest.collection,
            embedding_function=None,
            # Chroma's default looks at 100 candidates, and small collections shall give the same
            # answer every time.
            configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
        )

    @property
    def embedding(self) -> BaseEmbedding:
        """``hashing`` (offline, no weights) or an embedding from HuggingFace, by the manifest."""
        name = self.manifest.embedding
        if name == HASHING:
            return adapter.HashingEmbedding()
        try:
            from llama_index.embeddings.huggingface import HuggingFaceEmbedding  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ImportError(
                f"embedding {name!r} needs another package: pip install "
                f"llama-index-embeddings-huggingface; or use --embedding {HASHING}"
            ) from error
        embedding: BaseEmbedding = HuggingFaceEmbedding(model_name=name)
        return embedding


def require_manifest(path: Path) -> Manifest:
    """The manifest of a folder that must be a database."""
    if (manifest := Manifest.read(path)) is None:
        raise DatabaseError(
            f"{path} is no database (no {MANIFEST} there); make one with `blockattn-rag ingest "
            f"PATH --db {path}`"
        )
    return manifest


def chroma_client(path: Path, *, create: bool = False) -> ClientAPI:
    """Embedded Chroma in a folder, telemetry off.

    Raises:
        DatabaseError: ``create`` is False and there is no Chroma database.
    """
    if not create and not (path / "chroma.sqlite3").is_file():
        raise DatabaseError(f"{path} holds no Chroma database (no chroma.sqlite3 there)")
    import chromadb
    from chromadb.config import Settings

    path.mkdir(parents=True, exist_ok=True)
    return chromadb.PersistentClient(str(path), settings=Settings(anonymized_telemetry=False))


def _load_engine(path: Path, wanted: Manifest, device: str, dtype: str) -> Engine:
    if wanted.server is not None:
        from blockattn_rag.remote import RemoteEngine

        if (device, dtype) != ("auto", "auto"):
            raise ValueError(
                f"found device {device!r} and dtype {dtype!r}, but {wanted.server} has the model "
                "and decides on them; leave them out"
            )
        return RemoteEngine(wanted.server, tokenizer=wanted.model)
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.kv.quantization import check_kv_dtype

    with loading(wanted.model):
        return BlockAttentionEngine.from_pretrained(
            wanted.model,
            store=wanted.store or path / "kv",
            device=device,
            dtype=dtype,
            namespace=wanted.namespace,
            kv_dtype=check_kv_dtype(wanted.kv_dtype),
            calibration=_calibrations(path),
        )


def _calibration_path(folder: Path) -> Path:
    from blockattn_rag.store.directory import CALIBRATION_FILE  # it loads torch

    return folder / CALIBRATION_FILE


def _calibrations(folder: Path) -> Path | None:
    """The file of a database's own calibrations; None if it has none yet."""
    path = _calibration_path(folder)
    return path if path.exists() else None


def _with_sink(path: Path, engine: Engine, made: Manifest | None, sink: str) -> Engine:
    """The engine with a sink, unless none is named, or passages were another model's and this
    one's calibration says what it needs. A server has its own."""
    from blockattn_rag.engine.engine import BlockAttentionEngine

    if not isinstance(engine, BlockAttentionEngine):
        return engine
    is_own = made is not None and made.fingerprint == engine.model.fingerprint
    if not sink or (engine.calibration and not is_own):
        return engine
    return BlockAttentionEngine(
        engine.model,
        engine.store,
        namespace=engine.access.namespace,
        kv_dtype=engine.kv_dtype,
        calibration=_calibrations(path),
        sink=sink,
    )
