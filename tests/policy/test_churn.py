"""Times of rounds where requests come and go: an error of the tables is found as with a batch that stays."""

from __future__ import annotations

import random

import pytest
from policy_world import LOW, World, device, tree_sums

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.policy.served_rounds import ServedRound

CAPS = Shape(4, 4, 16)
LIFE = 100  # rounds of a request
THINK = 10  # rounds at most, in which a client sends nothing
PROMPT = 3.0  # seconds of a prefill, or by which a prompt lengthens a step; a plain round takes 1


class Server:
    """Serves so many clients, each of which sends its next request some rounds after an answer has ended.

    prefills: prompts are steps of their own, as in SGLang, else they are in the steps of rounds, as in vLLM.
    """

    def __init__(self, clients: int, prefills: bool, slower: float) -> None:
        self.costs, self.prefills, self.slower = device(2 * clients, level=0.1), prefills, slower
        self.policy = Policy(CAPS, CostModel(self.costs))
        self.now = 0.0
        self.chooser = ShapeChooser(CAPS, self.policy, clock=HostClock(lambda: self.now), learns_late=True)
        self.random = random.Random(0)
        self.left = [self.random.randint(1, LIFE) for _ in range(clients)]  # rounds of each running request
        self.thinking: list[int] = []  # rounds until each other client sends its next one

    def serve(self, rounds: int) -> list[Shape]:
        """The shapes of the rounds."""
        return [self._round() for _ in range(rounds)]

    def _round(self) -> Shape:
        arrived = self.thinking.count(0)
        self.thinking = [rounds - 1 for rounds in self.thinking if rounds]
        if arrived and self.prefills:
            self.chooser.end_round(arrived)
            self.now += PROMPT
        self.left += [LIFE] * arrived
        b = len(self.left)
        shape = self.chooser.choose(b, 0)
        self.chooser.begin(shape, b, 0)
        reached = [round(b * chance) for chance in tree_sums(shape, LOW)]
        kept = [sum(i < n for n in reached) for i in range(b)]
        self.chooser.observe(ServedRound(shape, b, 0), kept)
        self.now += self.costs.round(shape, b, 0) * (1.0 if shape == PLAIN else self.slower)
        self.left = [rounds - 1 for rounds in self.left if rounds > 1]
        self.thinking += [self.random.randrange(THINK) for _ in range(b - len(self.left))]
        if 0 in self.thinking and not self.prefills:  # these prompts are in the step that verifies these trees
            self.chooser.pause()
            self.now += PROMPT
        return shape


@pytest.mark.parametrize(("prefills", "timed"), [(True, 0.9), (False, 0.45)])
def test_under_churn_drafts_that_cost_more_than_their_tables_are_left(prefills: bool, timed: float) -> None:
    """64 clients, requests of 100 rounds: half of the rounds of vLLM have prompts in their steps, and no time."""
    server = Server(64, prefills, 1.5)
    world = World(server.costs, LOW)
    rates = {shape: world.rate(shape, 64) / (1.0 if shape == PLAIN else 1.5) for shape in server.policy.shapes}
    assert max(rates, key=rates.__getitem__) == PLAIN
    tabled = {shape: world.rate(shape, 64) for shape in server.policy.shapes}
    assert max(tabled, key=tabled.__getitem__) != PLAIN  # by the tables alone drafts are better
    server.serve(1000)
    assert server.policy.present == PLAIN
    totals = server.chooser.totals.values()
    share = sum(total.timed for total in totals) / sum(total.steps for total in totals)
    print(f"{share:.2f} of the rounds have a time")
    assert share > timed
