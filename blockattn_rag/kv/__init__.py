"""Keys and values of blocks, and their positions in a prompt."""

from blockattn_rag.kv.block_kv import BlockKV, store_key, token_digest
from blockattn_rag.kv.context import Assembly, Context, PlacedBlock, Positions, assemble, place
from blockattn_rag.kv.quantization import KVDtype, KVScales
from blockattn_rag.kv.rope import RotaryLayout, relative_error, rotate

__all__ = [
    "Assembly",
    "BlockKV",
    "Context",
    "KVDtype",
    "KVScales",
    "PlacedBlock",
    "Positions",
    "RotaryLayout",
    "assemble",
    "place",
    "relative_error",
    "rotate",
    "store_key",
    "token_digest",
]
