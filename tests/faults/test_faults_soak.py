"""Soak test: eight servers under load with restarts, kills and consoles; then all invariants are checked.

Long version: ``python -m pytest tests/faults/test_faults_soak.py -s --soak-minutes 20 --soak-seed 7``.
"""

from __future__ import annotations

from itertools import islice

import pytest

from soak import logs
from soak.engine import FORMAT, TEXT
from soak.journal import DONE, REFUSED, UNSURE, Journal, Order
from soak.play import ROUND, soak
from soak.schedule import DECK, schedule
from soak.world import World


def test_event_order_depends_only_on_seed():
    first = list(islice(schedule(7), 300))
    assert first == list(islice(schedule(7), 300))
    assert [str(action) for action in first] != [str(action) for action in islice(schedule(8), 300)]
    assert {action.kind for action in first[:ROUND]} == set(DECK), "every kind appears in each round"


def test_expected_outcome_of_orders(tmp_path):
    journal = Journal(tmp_path / "actions.log")

    def wanted(*orders: tuple[str, float, float, str]) -> set[str]:
        journal.orders[:] = [Order("one", frozenset({what}), *times, outcome) for what, *times, outcome in orders]
        return set(journal.expected("one"))

    assert wanted() == {"absent"}
    assert wanted(("running", 0, 1, DONE), ("stopped", 2, 3, DONE)) == {"stopped"}
    assert wanted(("running", 0, 2, DONE), ("stopped", 1, 3, DONE)) == {"running", "stopped"}, "both concurrently"
    assert wanted(("running", 0, 1, DONE), ("stopped", 2, 3, REFUSED)) == {"running"}
    assert wanted(("running", 0, 1, DONE), ("stopped", 2, 3, UNSURE)) == {"running", "stopped"}


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (range(100), ""),
        ([*range(50), *range(51, 100)], "1 lines of worker"),
        (range(99), "1 lines of worker"),
        ([*range(50), 49, *range(50, 100)], "doubled or out of place"),
    ],
)
def test_missing_or_duplicate_line_is_detected(tmp_path, lines, wrong):
    world = World(tmp_path / "home", Journal(tmp_path / "actions.log"))
    folder = world.state / "servers" / "alpha"
    for made in (folder, world.notes):
        made.mkdir(parents=True)
    text = "".join(FORMAT.format(worker="cafecafe", number=number, text=TEXT) for number in lines)
    (folder / "server.log").write_text(text)
    (world.notes / "flood-cafecafe").write_text(f"{world.ports['alpha']} 100")
    assert logs.check(world).written == 100
    assert [wrong in text for text in world.journal.wrong] == [True] * bool(wrong), world.journal.wrong


def test_soak_violates_no_invariant(pytestconfig: pytest.Config, tmp_path, capsys):
    seed, minutes = pytestconfig.getoption("soak_seed"), pytestconfig.getoption("soak_minutes")
    log = tmp_path / "actions.log"
    with capsys.disabled():
        print(f"\nsoak: seed {seed}, {minutes:g} minutes; what is done stands in {log}", flush=True)
    result = soak(seed, minutes, tmp_path)
    print(log.read_text())
    with capsys.disabled():
        print(result.text, flush=True)
    assert not result.journal.wrong, f"seed {seed}: {result.journal.wrong}; all actions: {log}"
