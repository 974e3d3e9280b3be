"""What a recipe that names no value gets, where that depends on the kind of head and on where it starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_targets import eagle3_head, random_readout
from training_runs import recipe

from eagle_plugin.learning.train.methods import METHODS, ObjectiveSettings
from eagle_plugin.learning.train.model import Parameters, objective_settings
from eagle_plugin.learning.train.objectives import Objective
from eagle_plugin.learning.train.recipe import TrainRecipe, parse_recipe


def read(**keys: Any) -> TrainRecipe:
    return parse_recipe(recipe(Path("target"), Path("store"), **keys), "the recipe")


@pytest.mark.parametrize(
    ("method", "steps", "wanted"),
    [
        ("training_time_test", 4, 0.8),
        ("feature_regression", 4, 0.8),
        ("parallel", 5, 1.0),
        ("blocks", 7, math.exp(-1 / 4)),  # a block of 8 rows
        ("blocks", 15, math.exp(-1 / 7)),
    ],
)
def test_the_weights_of_the_steps(method: str, steps: int, wanted: float) -> None:
    phases = [{"steps": steps, "share": 0.5}, {"steps": 2, "share": 0.5}]
    for phase in phases:  # a phase of fewer steps weighs them as the others do
        found = objective_settings(read(phases=phases), int(phase["steps"]), METHODS[method])
        assert found.decay == pytest.approx(wanted)
    own = read(phases=phases, loss={"decay": 0.6})
    assert objective_settings(own, steps, METHODS[method]).decay == 0.6


@pytest.mark.parametrize(
    ("head", "optimiser", "wanted"),
    [
        ({"kind": "eagle3"}, {}, 1e-3),
        ({"from": "head"}, {}, 2e-4),
        ({"kind": "peagle", "from": "head"}, {}, 2e-4),
        ({"kind": "eagle3", "init": "random"}, {}, 1e-3),
        ({"from": "head"}, {"lm_head_lr": 1e-3}, 1e-3),
    ],
)
def test_the_lm_head_of_a_trained_head_learns_slowly(
    head: dict[str, Any], optimiser: dict[str, Any], wanted: float
) -> None:
    settings = read(head=head, optimiser={"lr": 1e-3} | optimiser)
    objective = Objective(eagle3_head(), random_readout(), ObjectiveSettings(dtype=torch.float32))
    parameters = Parameters(objective, settings)
    rates = {id(p): group["lr"] for one in parameters.optimisers for group in one.param_groups for p in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in parameters.named.items()}
    assert found.pop("head.lm_head.weight") == pytest.approx(wanted)
    assert set(found.values()) == {1e-3}
