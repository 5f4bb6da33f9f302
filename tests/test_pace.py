"""Limits follow the machine, and a wait ends all the same. Time here is a number that waits add to."""

import os

import pytest

from tests import pace


class Machine:
    """Known to be at one ``pace`` and found at others, whenever it is measured again."""

    def __init__(self, monkeypatch, known, *later):
        self.now, self.later = 0.0, list(later)
        monkeypatch.setenv(pace.KEPT, str(known))
        monkeypatch.setattr(pace, "measured", lambda: self.later.pop(0))
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)

    def takes(self, seconds):
        """Work that ends at a time; what waits for it."""

        def wait(timeout):
            self.now = min(self.now + timeout, max(self.now, seconds))
            return self.now >= seconds

        return wait


def test_a_limit_is_longer_by_the_pace(monkeypatch):
    machine = Machine(monkeypatch, 3.0, 3.0)
    assert pace.patiently(machine.takes(29), 10)
    assert machine.later == [3.0], "nothing is measured while there is time"


def test_it_is_measured_once(monkeypatch):
    Machine(monkeypatch, 1.0, 2.5)
    monkeypatch.delenv(pace.KEPT)
    assert [pace.pace(), pace.pace(), pace.stretched(4)] == [2.5, 2.5, 10.0]
    assert os.environ[pace.KEPT] == "2.5", "for processes that start from here"


def test_a_machine_that_has_become_slower_is_given_more_time(monkeypatch):
    assert pace.patiently(Machine(monkeypatch, 1.0, 8.0).takes(75), 10)
    assert pace.pace() == 8.0


@pytest.mark.parametrize("later", [[1.0], [1.1], [4.0, 4.0]])
def test_what_takes_too_long_at_the_pace_of_the_machine_is_given_up(monkeypatch, later):
    machine = Machine(monkeypatch, 1.0, *later)
    assert not pace.patiently(machine.takes(75), 10)
    assert machine.later == []


def test_time_is_counted_from_the_beginning(monkeypatch):
    machine = Machine(monkeypatch, 1.0, 1.0)
    machine.now = 8.0
    assert not pace.patiently(machine.takes(11), 10, began=0.0)


def test_what_took_too_long_for_the_known_pace_is_judged_by_the_pace_of_now(monkeypatch):
    machine = Machine(monkeypatch, 2.0, 5.0, 5.0)
    assert pace.in_time(20, 10)
    assert machine.later == [5.0, 5.0], "nothing is measured for what was in time"
    assert pace.in_time(45, 10)
    assert not pace.in_time(51, 10)
    assert machine.later == []


def test_no_machine_is_faster_than_an_idle_one(monkeypatch):
    started = []
    monkeypatch.setattr(pace.subprocess, "run", lambda command, **_: started.append(command))  # it takes no time
    assert pace.measured() == 1.0
    assert [command[1:] for command in started] == [["-c", "import torch"]]
