"""Settings of block mode that calibration compares, from the cheapest repair to the dearest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from blockattn_rag.engine.calibration import PLAIN_SETTINGS
from blockattn_rag.prompts.promotion import NO_PROMOTION, by_attention
from blockattn_rag.prompts.sinks import FIRST_BLOCK, sink_ids
from blockattn_rag.prompts.tokenization import BlockTokenizer

SINKS = ("none", "bos", "head:1", "head:4", "head:16", FIRST_BLOCK)
"""What passages may be encoded after."""

# APE (2502.05431) and our own trial found the best values between 0.8 and 1.
MERGES = (
    *(f"scale:{s}" for s in (0.85, 0.9, 0.95)),
    *(f"scale:{s}:{t}" for t in (0.8, 0.9) for s in (0.85, 0.9, 0.95, 1)),
    *(f"bias:{b}" for b in (-1, -0.5, 0.5, 1)),
    *(f"bias:{b}:0.9" for b in (-1, -0.5, 0.5, 1)),
)
"""Weights of the context; see ``attention.context_merge``."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The block options that calibration chooses; see ``BlockOptions``."""

    sink: str = PLAIN_SETTINGS["sink"]
    correction: str = PLAIN_SETTINGS["correction"]
    merge: str = PLAIN_SETTINGS["merge"]
    promote: str = PLAIN_SETTINGS["promote"]
    reader: str = PLAIN_SETTINGS["reader"]

    @property
    def options(self) -> dict[str, str]:
        return asdict(self)

    @property
    def mode(self) -> str:
        """The name as a mode of the evaluation."""
        changed = [f"{k}={v}" for k, v in self.options.items() if v != PLAIN_SETTINGS[k]]
        return "+".join(changed) or "block"

    @property
    def cost(self) -> tuple[int, bool, int]:
        """What orders settings from simple to dear: passages that are computed per question, the
        question twice (promotion by attention), and the number of options that are not plain."""
        passages = 0 if self.promote == NO_PROMOTION else int(self.promote.rpartition(":")[2])
        changed = sum(value != PLAIN_SETTINGS[name] for name, value in self.options.items())
        return passages, by_attention(self.promote), changed


PLAIN = Setting()
"""Block mode as published."""

Stage = Callable[[Setting], Sequence[Setting]]
"""The settings to try next, made from the best one so far."""


def stages(
    sinks: Sequence[str],
    merges: Sequence[str] = MERGES,
    reader: Setting | None = None,
    most_promoted: int = 2,
    corrected: Setting | None = None,
    merged: Setting | None = None,
    supports_relay: bool = True,
) -> dict[str, Stage]:
    """The stages of the search by name: each varies one option, cheapest first.

    Args:
        reader: a reader adapter to try, with what it was made with; None: there is none.
        most_promoted: 0 tries no promotion, which costs tokens per question.
        corrected: a correction to try, with its sink.
        merged: a learned merge to try, with what it was made with.
        supports_relay: of the model; where it does not, merges and promotion by attention are
            refused, and not tried.
    """

    def with_merge(best: Setting) -> list[Setting]:
        learned = [] if merged is None else [replace(best, merge=merged.merge), merged]
        return [*(replace(best, merge=merge) for merge in merges), *learned]

    def with_reader(best: Setting) -> list[Setting]:
        assert reader is not None  # or there is no such stage
        bare = Setting(best.sink, best.correction)
        tried = [replace(one, reader=reader.reader) for one in (best, bare)]
        return list(dict.fromkeys([*tried, reader]))

    def with_promotion(best: Setting) -> list[Setting]:
        counts = range(1, most_promoted + 1)
        ways = ("", "attention:") if supports_relay else ("",)
        forms = [f"{how}{count}" for count in counts for how in ways]
        return [replace(best, promote=form) for form in forms]

    found: dict[str, Stage] = {"sinks": lambda best: [replace(best, sink=s) for s in sinks]}
    if corrected is not None:
        found["correction"] = lambda _: [corrected]
    if (merges or merged) and supports_relay:
        found["merges"] = with_merge
    if reader is not None:
        found["reader"] = with_reader
    if most_promoted:
        found["promotion"] = with_promotion
    return found


def usable_sinks(tokenizer: BlockTokenizer, sinks: Sequence[str] = SINKS) -> list[str]:
    """The sinks that a model has; of those with the same tokens, the first."""
    found: dict[tuple[object, ...], str] = {}
    for sink in sinks:
        try:
            tokens: tuple[object, ...] = (
                (sink,) if sink == FIRST_BLOCK else tuple(sink_ids(sink, tokenizer))
            )
        except ValueError:  # no BOS token, or a shorter head
            continue
        found.setdefault(tokens, sink)
    return list(found.values())
