"""No content writes control tokens, whoever wrote it, and every passage is one block.

The default run is a sample; ``HOSTILE_COUNT=10000`` (conversations) is the whole campaign, as is
``python -m tests.hostile``.
"""

from __future__ import annotations

import os

import pytest

from tests.hostile.campaign import run, trials
from tests.hostile.families import Family, families

COUNT = int(os.environ.get("HOSTILE_COUNT", "594"))
FAMILIES = sorted(families())


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return families()[request.param]


@pytest.mark.timeout(3600)
def test_hostile_contents_write_no_control_token_and_break_no_block(family: Family) -> None:
    tally = run(COUNT // len(FAMILIES), within=[family])
    assert not tally.faults, "\n".join(tally.examples[:5])
    assert tally.prompts >= COUNT // len(FAMILIES)


def test_every_part_of_every_family_is_tried_in_a_default_run(family: Family) -> None:
    assert len(trials(family)) <= 594 // len(FAMILIES)
