"""A short run of each kind of fault; ``make chaos`` runs them for long (tests/chaos/__main__.py)."""

from __future__ import annotations

import pytest

from tests.chaos.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
async def test_nothing_is_lost_wrong_or_answered_twice_when(name: str) -> None:
    scenario = SCENARIOS[name]
    ledger = await scenario(seed=7, seconds=3.0)
    print(name, ledger)
