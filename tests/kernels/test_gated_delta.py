"""Trees of a gated delta net against the rule applied token by token to every path alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from eagle_plugin.kernels.gated_delta import Left, convolve, delta_rule, gates, past_after, plan, state_after

B, HK, HV, K, V, TAPS = 3, 2, 4, 8, 6, 4
CHANNELS = 10


def random_parents(width: int, generator: torch.Generator) -> Tensor:
    """[B, W]: the parent of every node, -1 of the root."""
    rows = [[-1, *(int(torch.randint(i, (), generator=generator)) for i in range(1, width))] for _ in range(B)]
    return torch.tensor(rows)


def path_of(parents: Tensor, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def ancestors_of(parents: Tensor) -> Tensor:
    bitmasks = [[sum(1 << j for j in path_of(row, i)) for i in range(len(row))] for row in parents]
    return torch.tensor([[word - (1 << 64) if word >> 63 else word for word in row] for row in bitmasks])


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for one sequence; q and k [T, HK, K], v [T, HV, V], g and beta [T, HV], state [HV, V, K], in float64."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = ((x.repeat_interleave(HV // HK, 1)) for x in (q * K**-0.5, k))
    found = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        memory = (state @ k[t][..., None])[..., 0]
        state = state + (beta[t][:, None] * (v[t] - memory))[..., None] * k[t][:, None]
        found.append((state @ q[t][..., None])[..., 0])
    return torch.stack(found), state


@pytest.mark.parametrize("width", [1, 2, 9, 64])
def test_every_path_is_that_of_the_rule_alone(width: int) -> None:
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    parents = random_parents(width, generator)
    tree = plan(ancestors_of(parents), TAPS)
    q, k, v = draw(B, width, HK, K), draw(B, width, HK, K), draw(B, width, HV, V)
    g, beta = gates(draw(B, width, HV), draw(B, width, HV), draw(HV), draw(HV))
    state = draw(B, HV, V, K)
    found, decays, keys, updates = delta_rule(q, k, v, g, beta, state, tree)
    left = Left(torch.zeros(B, width, 1), decays, keys, updates)
    for node in {0, width // 2, width - 1}:
        after = state_after(state, left, tree, torch.full((B,), node))
        for i in range(B):
            path = path_of(parents[i], node)
            parts = (x[i, path].double() for x in (q, k, v, g, beta))
            wanted, wanted_state = token_by_token(*parts, state[i].double())
            torch.testing.assert_close(found[i, node].double(), wanted[-1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(after[i].double(), wanted_state, rtol=1e-4, atol=1e-4)
    if width > 2:  # the control: the last node does not see all others
        everything = token_by_token(*(x[0].double() for x in (q, k, v, g, beta)), state[0].double())[0][-1]
        assert not torch.allclose(found[0, -1].double(), everything, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_every_path_is_convolved_alone(bias: bool) -> None:
    generator, width = torch.Generator().manual_seed(1), 12
    parents = random_parents(width, generator)
    tree = plan(ancestors_of(parents), TAPS)
    x, past = torch.randn(B, width, CHANNELS, generator=generator), torch.randn(B, CHANNELS, TAPS - 1)
    weight, added = torch.randn(CHANNELS, TAPS, generator=generator), torch.randn(CHANNELS) if bias else None
    out = convolve(x, past, weight, added, tree)
    none = torch.zeros(B, 1, 1, 1)
    for node in range(width):
        kept = past_after(past, Left(x, none, none, none), tree, torch.full((B,), node))
        for i in range(B):
            line = torch.cat([past[i], x[i, path_of(parents[i], node)].T], 1)
            wanted = silu(conv1d(line[None], weight[:, None], added, groups=CHANNELS))[0, :, -1]
            torch.testing.assert_close(out[i, node], wanted, rtol=1e-5, atol=1e-5)
            assert torch.equal(kept[i], line[:, -(TAPS - 1) :])


def test_strong_decays_stay_finite() -> None:
    """Down a path the sum of the decays passes what exp can take: only differences are used."""
    width = 16
    tree = plan(torch.tensor([[(1 << (i + 1)) - 1 for i in range(width)]]), TAPS)
    q, k, v = (torch.randn(1, width, h, d) for h, d in ((HK, K), (HK, K), (HV, V)))
    g, state = torch.full((1, width, HV), -40.0), torch.randn(1, HV, V, K)
    found, *left = delta_rule(q, k, v, g, torch.full((1, width, HV), 0.5), state, tree)
    after = state_after(state, Left(torch.zeros(1, 1, 1), *left), tree, torch.tensor([width - 1]))
    assert found.isfinite().all() and after.isfinite().all() and after.abs().max() > 1e-3
