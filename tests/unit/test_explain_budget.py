"""The CPU that explanations may take."""

from __future__ import annotations

from whyspan.pipeline.explain_budget import BATCH_S, BURST_S, ExplainBudget


class Clocks:
    """A wall clock and a CPU clock that tests move."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def budget(self, ratio: float) -> ExplainBudget:
        return ExplainBudget(ratio, lambda: self.cpu, lambda: self.wall)


def test_a_burst_is_allowed_and_no_more() -> None:
    t = Clocks()
    budget = t.budget(0.25)
    made = 0
    while budget.allows():
        t.cpu += 0.125
        budget.spent()
        made += 1
        budget.begin()
    assert made == 0.25 * BURST_S / 0.125


def test_one_batch_takes_its_share_at_most() -> None:
    t = Clocks()
    budget = t.budget(1.0)
    for _ in range(3):
        budget.begin()
        made = 0
        while budget.allows():
            t.cpu += BATCH_S / 4
            budget.spent()
            made += 1
        assert made == 4


def test_what_a_batch_may_not_spend_is_left_for_the_next() -> None:
    t = Clocks()
    budget = t.budget(0.25)
    for batch in range(1, 22):
        budget.begin()
        assert budget.allows()
        t.cpu += BATCH_S
        budget.spent()
        assert not budget.allows()
        assert budget.has_left() == (batch * BATCH_S < 0.25 * BURST_S)
        if not budget.has_left():
            break
    else:
        raise AssertionError


def test_over_time_the_share_holds_whatever_one_explanation_costs() -> None:
    t = Clocks()
    budget = t.budget(0.25)
    for _ in range(10_000):
        t.wall += 0.1
        budget.begin()
        if budget.allows():
            t.cpu += 0.7
            budget.spent()
    assert 0.24 * t.wall <= t.cpu <= 0.26 * t.wall + 0.25 * BURST_S


def test_cpu_that_others_take_in_between_does_not_count() -> None:
    t = Clocks()
    budget = t.budget(0.25)
    for _ in range(100):
        t.wall += 1
        t.cpu += 1  # draining, feeding
        budget.begin()
        assert budget.allows()
        t.cpu += 0.2
        budget.spent()


def test_idle_time_is_not_saved_up_beyond_the_burst() -> None:
    t = Clocks()
    budget = t.budget(0.1)
    t.wall += 3600
    made = 0
    while budget.allows():
        t.cpu += 1.0
        budget.spent()
        made += 1
        budget.begin()
    assert made == round(0.1 * BURST_S)


def test_more_than_a_core_is_no_limit_for_a_batch() -> None:
    t = Clocks()
    budget = t.budget(2.0)
    budget.begin()
    for _ in range(30):
        assert budget.allows()
        t.cpu += 1.0
        budget.spent()


def test_another_ratio_begins_anew() -> None:
    t = Clocks()
    budget = t.budget(0.25)
    while budget.allows():
        t.cpu += 1.0
        budget.spent()
        budget.begin()
    budget.reconfigure(0.5)
    assert budget.allows()
