"""Which questions a fit was made with: a certificate of it needs others.

They lie in the result's folder as digests, because logs of questions may be private. With them lie
those of the fits that it started from, or was trained on top of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from blockattn_rag.errors import DataError
from blockattn_rag.files.atomic import write_json

ASKED_FILE = "questions.json"


def question_digest(text: str) -> str:
    """sha256 of a question, whose case does not count."""
    return hashlib.sha256(text.strip().casefold().encode("utf-8", "surrogatepass")).hexdigest()


def write_asked(
    folder: Path, questions: Iterable[str], before: Iterable[str] = frozenset()
) -> None:
    """Note questions in a result's folder; ``before``: digests of further ones."""
    write_json(folder / ASKED_FILE, sorted({*map(question_digest, questions), *before}))


def read_asked(fit: str | Path) -> frozenset[str]:
    """Digests of the questions that lie with a fit; none for what others made, and for words such
    as ``"none"``.

    Args:
        fit: folder of a result, or the file of a correction or a merge in it.

    Raises:
        DataError: the file is damaged.
    """
    found = Path(fit).expanduser().resolve()
    path = (found.parent if found.is_file() else found) / ASKED_FILE
    try:
        return frozenset(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return frozenset()
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); make the result anew") from error
