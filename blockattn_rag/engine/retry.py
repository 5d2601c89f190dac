"""Retry: a question that block mode does not answer is answered again.

Models that were not block-fine-tuned say more often in block mode than in full mode that the
passages do not hold the answer. Such answers are short and of few forms, so they can be told.

    none         the first answer is given
    full         again in full mode
    promote:N    again in block mode with that promotion, also promote:last:N, promote:attention:N
"""

from __future__ import annotations

from collections.abc import Sequence

from blockattn_rag.prompts.promotion import NO_PROMOTION, check_promotion

NO_RETRY = "none"
FULL = "full"
PROMOTE = "promote:"

ABSTENTIONS = (
    *("i don't know", "i do not know", "i'm not sure", "i am not sure"),
    *(
        "context does not",
        "context doesn't",
        "context provided does not",
        "context information does not",
    ),
    *("text does not", "text doesn't", "passage does not", "passages do not", "passages don't"),
    *("document does not", "documents do not", "sources do not", "information does not"),
    *("not mentioned", "no mention of", "not specified", "not stated", "not provided in"),
    *("not given in", "not found in", "not contained in", "not included in", "not available in"),
    *("no information", "not enough information", "insufficient information"),
    *("cannot be determined", "cannot determine", "can't determine", "unable to determine"),
    *("cannot be answered", "cannot answer", "can't answer", "unable to answer", "unanswerable"),
)
"""What English answers say that give none. Case does not matter."""

_LONGEST_CHARACTERS = 200


def check_retry(retry: str) -> str:
    """The retry in its written form.

    Raises:
        ValueError: it is none of the forms above.
    """
    if retry in (NO_RETRY, FULL):
        return retry
    if isinstance(retry, str) and retry.startswith(PROMOTE):
        promote = retry.removeprefix(PROMOTE)
        if promote != NO_PROMOTION:
            return PROMOTE + check_promotion(promote)
    raise ValueError(
        "retry must be 'none', 'full' or 'promote:' and a form of promote, such as 'promote:2'; "
        f"found {retry!r}"
    )


def check_abstentions(phrases: Sequence[str]) -> tuple[str, ...]:
    """Phrases as they are compared.

    Raises:
        TypeError: a single text.
        ValueError: one of them is no text, or empty, which every answer would contain.
    """
    if isinstance(phrases, str):
        raise TypeError(f"abstentions must be a list of phrases, found one: {phrases!r}")
    for phrase in phrases:
        if not isinstance(phrase, str) or not phrase.strip():
            raise ValueError(f"abstentions must be phrases of some text, found {phrase!r}")
    return tuple(phrases)


def is_too_long(answer: str) -> bool:
    """Whether an answer, of which more may come, is too long for an abstention."""
    return len(answer.strip()) > _LONGEST_CHARACTERS


def abstains(answer: str, phrases: Sequence[str] = ABSTENTIONS) -> bool:
    """Whether a whole answer says that there is none: a short one that contains a phrase."""
    plain = _plain(answer)
    return not is_too_long(answer) and any(_plain(phrase) in plain for phrase in phrases)


def _plain(text: str) -> str:
    return " ".join(text.casefold().replace("\u2019", "'").split())
