"""Certificates: what is left of the difference to full mode, on questions nothing was chosen on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from blockattn_rag.engine.results import Certificate
from blockattn_rag.evaluation.fidelity import FLOOR, FidelityReport, is_rounding
from blockattn_rag.evaluation.metrics import Interval

PLAIN_MODE = "block"


def certificate(
    report: FidelityReport,
    mode: str,
    passages: int,
    targets: Mapping[str, float],
    seen: int = 0,
) -> Certificate:
    """What a report on prompts of so many passages says of a mode.

    The bounds of the agreement are the outer ones of two intervals: a bootstrap over questions,
    which knows that the tokens of an answer depend on each other, and Clopper-Pearson over tokens,
    which knows that a few tokens prove little, even if they all agree. ``identical`` has
    Clopper-Pearson's bounds.

    Args:
        report: of the mode and of plain block mode.
        targets: what the lower bounds of ``agreement`` and ``recovery`` must reach. Where block
            mode is full mode but for rounding, nothing is to recover.
        seen: questions of the report that the mode was fitted with; it does not qualify with any.
    """
    found = report[mode]
    rows = [record for record in report.records if record.mode == mode]
    agreeing = sum(round(row.agreement * row.tokens) for row in rows)
    by_tokens = clopper_pearson(agreeing, sum(row.tokens for row in rows))
    identical = clopper_pearson(sum(row.agreement == 1 for row in rows), len(rows))
    agreement_low = min(found.agreement.low, by_tokens.low)
    recovery = found.recovery
    nothing_to_recover = is_rounding(report[PLAIN_MODE].kl.mean, report[FLOOR].kl.mean)
    reached = {
        "agreement": agreement_low,
        "recovery": float(nothing_to_recover) if recovery is None else recovery.low,
    }
    return Certificate(
        passages=passages,
        questions=found.samples,
        kl=found.kl.mean,
        kl_low=found.kl.low,
        kl_high=found.kl.high,
        agreement=found.agreement.mean,
        agreement_low=agreement_low,
        agreement_high=max(found.agreement.high, by_tokens.high),
        identical=identical.mean,
        identical_low=identical.low,
        identical_high=identical.high,
        recovery=None if recovery is None else recovery.mean,
        recovery_low=None if recovery is None else recovery.low,
        recovery_high=None if recovery is None else recovery.high,
        qualified=not seen and all(reached[name] >= target for name, target in targets.items()),
        seen=seen,
    )


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """The exact interval of a share (Clopper & Pearson 1934): shares under which the count found,
    or one further off, is not less likely than ``(1 - level) / 2``."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"found {successes} successes of {trials} trials")
    tail = (1 - level) / 2
    failures = trials - successes
    low = 1 - _bound(failures, trials, tail)
    return Interval(successes / trials, low, _bound(successes, trials, tail))


def _bound(successes: int, trials: int, tail: float) -> float:
    """The share at which so few successes have the probability ``tail``; by bisection."""
    if successes == trials:
        return 1.0
    low, high = successes / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(successes, trials, middle) > tail:
            low = middle
        else:
            high = middle
    return high


def _at_most(successes: int, trials: int, share: float) -> float:
    """The probability of at most so many successes, of a binomial distribution."""
    if share in (0.0, 1.0):
        return float(share == 0.0 or successes == trials)
    of_all = math.lgamma(trials + 1)
    logs = (
        of_all
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(share)
        + (trials - count) * math.log1p(-share)
        for count in range(successes + 1)
    )
    return math.fsum(map(math.exp, logs))
