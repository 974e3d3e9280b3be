"""The penalties' oracle against plain Python, token by token."""

from __future__ import annotations

import struct

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.core.penalties import Penalties, count_tokens, penalize_nodes

prop = settings(derandomize=True, deadline=None, max_examples=60, database=None)
V = 7


def float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def penalised_row(logits: list[float], generated: list[int], strengths: tuple[float, float, float]) -> list[float]:
    """The penalties of SGLang after a list of generated tokens, each operation rounded to float32."""
    frequency, presence, repetition = map(float32, strengths)
    out = list(logits)
    for token in set(generated):
        offset = float32(float32(frequency * generated.count(token)) + presence)
        lowered = float32(out[token] - offset)
        out[token] = float32(lowered * repetition if lowered < 0 else lowered / repetition)
    return out


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], tuple[float, float, float], list[int], int]:
    output = draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=9))  # the last is the root
    width = draw(st.integers(1, 10))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, width))]
    tokens = [output[-1], *(draw(st.integers(0, V - 1)) for _ in range(1, width))]
    strength = st.sampled_from([0.0, 0.3, -0.7, 1.1])
    strengths = (draw(strength), draw(strength), draw(st.sampled_from([1.0, 1.3, 0.8])))
    stops = draw(st.lists(st.integers(-1, V - 1), max_size=3))
    return output, parents, tokens, strengths, stops, draw(st.integers(0, 14))


@prop
@given(requests(), st.integers(0, 5))
def test_penalize_nodes(
    case: tuple[list[int], list[int], list[int], tuple[float, ...], list[int], int], row: int
) -> None:
    output, parents, tokens, strengths, stops, min_new = case
    prompt, width = 20, len(tokens)
    paths = [[0] for _ in tokens]
    for node in range(1, width):
        paths[node] = [*paths[parents[node]], node]
    logits = torch.randn(width, V, generator=torch.Generator().manual_seed(row))
    wanted = []
    for node, path in enumerate(paths):
        generated = output + [tokens[n] for n in path[1:]]
        wanted.append(penalised_row(logits[node].tolist(), generated, strengths))  # type: ignore[arg-type]
        if len(generated) < min_new:
            for token in set(stops) - {-1}:
                wanted[-1][token] = -torch.inf

    def table(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A table of which only the request's row has this value."""
        return torch.full((6,), 9, dtype=dtype).index_fill_(0, torch.tensor([row]), value)

    counts = torch.full((6, V), 5, dtype=torch.int32)
    counts[row] = torch.bincount(torch.tensor(output), minlength=V)
    penalties = Penalties(
        counts,
        *(table(x) for x in strengths),
        torch.tensor(stops, dtype=torch.int64).expand(6, -1),
        table(min_new + prompt - 1 if min_new else 0, torch.int64),
    )
    penalize_nodes(
        logits,
        torch.tensor([tokens]),
        torch.tensor([[sum(1 << n for n in path) for path in paths]]),
        torch.tensor([[len(path) - 1 for path in paths]], dtype=torch.int32),
        torch.tensor([row]),
        torch.tensor([prompt + len(output) - 1]),
        penalties,
    )
    assert torch.equal(logits, torch.tensor(wanted))


def test_count_tokens() -> None:
    counts = torch.zeros(3, 5, dtype=torch.int32)
    tokens = torch.tensor([[1, 1, 4], [1, 0, 0], [2, 3, 0]])
    count_tokens(counts, torch.tensor([2, 0, 2]), tokens, torch.tensor([3, 1, 0], dtype=torch.int32))
    assert counts.tolist() == [[0, 1, 0, 0, 0], [0] * 5, [0, 2, 0, 0, 1]]
