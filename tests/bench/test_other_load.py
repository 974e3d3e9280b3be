"""What other processes used is what is left of the machine's time."""

import pytest

from eagle_plugin.bench.other_load import OtherLoad, machine_seconds


def load(machine: float, server: float, own: float, seconds: float = 10.0) -> OtherLoad:
    readers = [iter((100.0, 100.0 + value)) for value in (server, machine, own, seconds)]
    return OtherLoad(*(lambda reader=reader: next(reader) for reader in readers))


def test_the_rest_of_the_machine_is_the_share():
    assert load(machine=18.0, server=12.0, own=1.0).share(cores=2) == pytest.approx(0.25)
    assert load(machine=13.0, server=12.0, own=1.0).share(cores=2) == 0.0


def test_readings_at_slightly_different_moments_stay_between_0_and_1():
    assert load(machine=12.0, server=12.1, own=1.0).share(cores=2) == 0.0
    assert load(machine=30.0, server=1.0, own=0.0).share(cores=2) == 1.0
    assert load(machine=30.0, server=1.0, own=0.0, seconds=0.0).share(cores=2) == 0.0


def test_the_machine_has_used_time():
    assert machine_seconds() > 0.0
