"""Which questions a result was made with: a certificate of it needs others.

They lie in the result's folder as digests, because logs of questions may be private.
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


def write_asked(folder: Path, questions: Iterable[str]) -> None:
    """Note questions in a result's folder."""
    write_json(folder / ASKED_FILE, sorted(set(map(question_digest, questions))))


def read_asked(folder: Path) -> frozenset[str]:
    """Digests of the questions noted in a folder; none for what others made.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / ASKED_FILE
    try:
        return frozenset(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return frozenset()
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); make the result anew") from error
