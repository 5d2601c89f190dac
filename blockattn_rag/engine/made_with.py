"""What readers and learned merges were made with, and the warning that they are used with others.

A fit repairs what is left by the sink, the correction and the merge that it was made on top of, so
it belongs to these. Its own file tells them: the sink, and the others by their digests, or as they
were named where they are no files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import load_merge
from blockattn_rag.engine.option_files import correction_digest, merge_digest
from blockattn_rag.engine.options import NO_CORRECTION, NO_READER, GenerateOptions
from blockattn_rag.model import BlockModel

logger = logging.getLogger("blockattn_rag")

# Warnings that were given: one for each pair of what was expected and found.
_told: set[str] = set()


def made_with(sink: str, correction: str, merge: str) -> dict[str, str]:
    """What a fit is made with, as its file tells it: texts by the names of the options.

    Raises:
        ValueError: a file is not there, or is no such file.
    """
    return {
        "sink": sink,
        "correction": correction_digest(correction) or NO_CORRECTION,
        "merge": merge_digest(merge) or merge,
    }


def noted_with(model: BlockModel, options: GenerateOptions) -> dict[str, Mapping[str, str]]:
    """What the reader and the learned merge that options name tell of what they were made with, by
    option; fits of earlier versions tell less, and adapters of PEFT nothing.

    Raises as ``BlockModel.load_reader`` and ``load_merge``.
    """
    found: dict[str, Mapping[str, str]] = {}
    if options.reader != NO_READER:
        told = model.load_reader(options.reader).metadata
        names = ("sink", "correction", "merge")
        found["reader"] = {n: told[n] for n in names if isinstance(told.get(n), str)}
    if isinstance(merge := load_merge(options.merge), LearnedMerge):
        found["merge"] = merge.made_with
    return found


def foreign(model: BlockModel, options: GenerateOptions) -> str:
    """Why fits that options name do not belong together; empty if they do, as far as they tell."""
    noted = noted_with(model, options)
    used = made_with(options.sink, options.correction, options.merge) if noted else {}
    return " ".join(
        f"The {name} in {getattr(options, name)} was made with {_spelled(told, others)}, and is "
        f"used with {_spelled(used, others)}."
        for name, told in noted.items()
        if (others := [one for one in told if told[one] != used[one]])
    )


def warn_of_foreign(why: str) -> None:
    """Tell, once, what ``foreign`` found."""
    if why and why not in _told:
        _told.add(why)
        logger.warning(
            "%s Answers may be worse than without it: use it with what it was made with (its "
            "README.md tells the files), or make one for what is used (`blockattn-rag adapt`)",
            why,
        )


def is_digest(told: str) -> bool:
    """Whether a text of ``made_with`` is a file's digest, and no name."""
    return len(told) == hashlib.sha256().digest_size * 2


def _spelled(told: Mapping[str, str], names: list[str]) -> str:
    """Such as ``sink=head:4 and the correction 1a2b3c4d5e6f...``."""
    return " and ".join(
        f"the {name} {told[name][:12]}..." if is_digest(told[name]) else f"{name}={told[name]}"
        for name in names
    )
