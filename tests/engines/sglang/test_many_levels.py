"""P-EAGLE heads of one to four layers that know their target, at the limits of a draft's levels in SGLang."""

from __future__ import annotations

import json

import peagle_models
import pytest
from serving import accept_length, generate, serving, tiny_spec
from tiny_models import read_markov_map

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

# Layers of the head, which knows one level more; the caps. 16 levels, (steps - 1) * topk = 64, both with 60.
CASES = [(4, (16, 1, 17)), (2, (9, 8, 64)), (1, (16, 4, 64))]
TRAINED = 2  # levels that the record of another head names
TOKENS = 64


@pytest.mark.parametrize("cases", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_text_is_the_targets_and_the_levels_that_a_head_knows_are_accepted(cases, tmp_path, markov_target):
    successor = read_markov_map(markov_target)
    kept = sorted(set(successor.tolist()))
    specs, wanted = [], []
    for layers, shape in CASES[:cases]:
        head = peagle_models.peagle_head(tmp_path / f"{layers}-layers", markov_target, kept, layers=layers)
        specs.append(tiny_spec(markov_target, head, shape))
        wanted.append(layers + 2)
    head = peagle_models.peagle_head(tmp_path / "3-layers", markov_target, kept, layers=3)
    record = {"format": 1, "kind": "peagle", "aux_layers": [2, 3, 4], "target": {}}
    record["training"] = {"recipe": {"phases": [{"steps": TRAINED}]}}
    (head / "eagle_plugin.json").write_text(json.dumps(record))
    specs.append(tiny_spec(markov_target, head, (4, 2, 12)))
    wanted.append(TRAINED + 1)
    with serving(specs, tmp_path) as servers:
        for server, most in zip(servers, wanted, strict=True):
            answer = generate(server, "root", 1 + TOKENS)
            ids = answer["output_ids"]
            assert ids[1:] == [int(successor[token]) for token in ids[:-1]]
            # A level that the head does not know is right by chance at most.
            assert most - 0.5 < accept_length([answer]) < most + 1
        assert accept_length([answer]) <= TRAINED + 1
        assert f"at most {TRAINED} steps, 2 children per node, 7 nodes" in servers[-1].log_text()
        assert servers[-1].log_text().count(f"was trained to draft {TRAINED} tokens in one forward") >= 1
