"""The oracle of a round's start against plain Python."""

from __future__ import annotations

import torch

from eagle_plugin.core.round_start import RoundStart, start_round
from eagle_plugin.core.sampling import SamplingParams


def test_start_round() -> None:
    req_to_token = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    sampling = SamplingParams.of(2, min_p=0.1)._replace(
        temperatures=torch.tensor([0.5, 0.7]),
        top_ks=torch.tensor([7, 8], dtype=torch.int32),
        top_ps=torch.tensor([0.9, 0.8]),
    )
    out = RoundStart.empty(3, 2, 6)
    out.table.fill_(-1)
    start_round(out, torch.tensor([3, 7]), torch.tensor([2, 1]), req_to_token, torch.tensor([4, 5, 6]), sampling)
    assert out.prefix_lens.tolist() == [3, 7, 1]
    assert out.requests.tolist() == [2, 1, 0]
    assert out.rng_keys.tolist() == [6, 5, 0]
    assert out.slots.tolist() == [[20, 21], [16, 0], [0, 0]]  # row 1 ends with position 7
    assert out.table.tolist() == [[17, 18, 19, 20, 21, -1], [9, 10, 11, 12, 13, 14], [0, 0, 0, -1, -1, -1]]
    assert out.sampling.temperatures.tolist() == torch.tensor([0.5, 0.7, 1.0]).tolist()
    assert out.sampling.top_ks.tolist() == [7, 8, 1]
    assert out.sampling.top_ps.tolist() == torch.tensor([0.9, 0.8, 1.0]).tolist()
    assert out.sampling.min_ps.tolist() == torch.tensor([0.1, 0.1, 0.0]).tolist()


def test_windows_of_the_slots() -> None:
    start = RoundStart.empty(2, 5, 8)
    start.slots.copy_(torch.arange(10).view(2, 5))
    assert start.window(0, 5) is start.slots
    for first, count in ((0, 2), (1, 3), (4, 1)):
        found = start.window(first, count)
        assert found.tolist() == [[*range(first, first + count)], [*range(5 + first, 5 + first + count)]]
        assert found.stride() == (count, 1)
