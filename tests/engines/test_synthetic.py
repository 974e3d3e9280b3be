"""The setting of synthetic acceptance that both engines share, and a round of it."""

from __future__ import annotations

import re

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.runtime.accept import accept
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.runtime.synthetic import (
    VARIABLE,
    WARNING,
    SyntheticError,
    format_rates,
    parse_rates,
    read_rates,
    source_of,
)
from eagle_plugin.selftest.tree_paths import random_tree

SHAPE = Shape(3, 4, 16)
VOCABULARY = 30
TABLE = "3/4/16=0.8,0.6,0.4; 1/4/5=0.8"
RATES = SyntheticRates(((SHAPE, (0.8, 0.6, 0.4)), (Shape(1, 4, 5), (0.8,))))


def test_a_table_is_read_and_written() -> None:
    assert read_rates(None, "theirs", False, {VARIABLE: TABLE}) == RATES
    assert parse_rates(format_rates(dict(RATES.of_shapes))) == list(RATES.of_shapes)
    assert source_of(RATES, "theirs") == VARIABLE


def test_it_is_off_unless_somebody_asks() -> None:
    assert read_rates(None, "theirs", True, {}) is None
    assert read_rates(None, "theirs", True, {VARIABLE: ""}) is None


def test_the_engines_own_setting_holds_for_all_shapes() -> None:
    rates = read_rates((0.7, 0.2), "theirs", False, {})
    assert rates is not None and rates.of(SHAPE) == rates.of(Shape.chain(1)) == (0.7, 0.2)
    assert source_of(rates, "theirs") == "theirs"
    assert "SYNTHETIC ACCEPTANCE (theirs)" in WARNING % "theirs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "has '1', wanted STEPS/TOPK/WIDTH=RATE"),
        ("true", "has 'true', wanted"),
        ("3/4/16", "has '3/4/16', wanted"),
        ("3/4/16=0.8,0.6", "has 2 rates for 3/4/16, wanted 3: one per level"),
        ("3/4/16=0.8,0.6,0.7", "probabilities that do not increase"),
        ("3/4/16=1.8,0.6,0.5", "probabilities that do not increase"),
        ("3/4/16=0.8,0..6,0.5", "has '3/4/16=0.8,0..6,0.5', wanted"),
        ("1/4/5=0.8;1/4/5=0.7", "has 1/4/5 twice"),
        ("0/1/1=0.8", "has the shape 0/1/1, wanted drafts"),
        ("3/4/99=0.8,0.7,0.6", "2 to 64 nodes"),
        ("1/4/5=0.8;", "has '', wanted"),
    ],
)
def test_a_table_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(SyntheticError, match=f"^{VARIABLE} .*{re.escape(message)}"):
        read_rates(None, "theirs", False, {VARIABLE: text})


def test_two_settings_at_once() -> None:
    with pytest.raises(SyntheticError, match=f"{VARIABLE} and theirs are both set"):
        read_rates((0.5,), "theirs", False, {VARIABLE: TABLE})


@pytest.mark.parametrize(("engines", "named"), [((0.5,), "theirs"), (None, VARIABLE)])
def test_text_that_means_nothing_is_not_recorded_for_training(engines: tuple[float] | None, named: str) -> None:
    with pytest.raises(SyntheticError, match=f"{named} makes text that means nothing, and EAGLE_CAPTURE"):
        read_rates(engines, "theirs", True, {} if engines else {VARIABLE: TABLE})


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_round(is_greedy: bool) -> None:
    """The same key and position give the same path whatever else is in the batch; without rates the round is real."""
    b, gen = 64, torch.Generator().manual_seed(0)
    tree = random_tree(torch.randint(0, VOCABULARY, (b,), generator=gen), SHAPE, VOCABULARY, gen)
    drafts = Drafts(tree, SHAPE)
    logits = torch.randn(b * SHAPE.width, VOCABULARY, generator=gen)
    keys = None if is_greedy else torch.arange(b)
    lengths = torch.arange(b) * 3
    real = accept(drafts, logits, SamplingParams.greedy(b), keys, lengths, "joint")
    found = accept(drafts, logits, SamplingParams.greedy(b), keys, lengths, "joint", RATES)
    again = accept(drafts, logits, SamplingParams.greedy(b), keys, lengths, "joint", RATES)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert [x.dtype for x in found] == [x.dtype for x in real] and [x.shape for x in found] == [x.shape for x in real]
    assert len(set(found.lengths.tolist())) == 4 and found.lengths.float().mean() > real.lengths.float().mean() + 1
    if keys is not None:
        other = accept(drafts.take(torch.arange(8, 40)), logits.view(b, -1, VOCABULARY)[8:40].reshape(-1, VOCABULARY),
                       SamplingParams.greedy(32), keys[8:40], lengths[8:40], "joint", RATES)  # fmt: skip
        assert all(torch.equal(x[8:40], y) for x, y in zip(found, other, strict=True))


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_round_on_a_gpu_reads_nothing_on_the_host(library: FakeLibrary, is_greedy: bool) -> None:
    tree = DraftTree.padding(torch.zeros(3, dtype=torch.int64, device=CUDA), SHAPE.width)
    drafts = Drafts(tree, SHAPE)
    lengths = torch.zeros(3, dtype=torch.int64, device=CUDA)
    logits = torch.zeros(3 * SHAPE.width, VOCABULARY, device=CUDA)
    found = accept(
        drafts, logits, SamplingParams.greedy(3, CUDA), None if is_greedy else lengths, lengths, "joint", RATES
    )
    assert all_on_cuda(found) and library.launched[-2:] == ["verify_tree", "uniforms"]


def test_a_round_can_be_captured() -> None:
    """Replayed with other trees, keys and lengths in the same memory."""
    from eagle_plugin.runtime import graph_emulator

    graph_emulator.install()
    b, gen = 6, torch.Generator().manual_seed(1)

    def inputs(seed: int) -> tuple[Drafts, torch.Tensor, torch.Tensor, torch.Tensor]:
        gen.manual_seed(seed)
        tree = random_tree(torch.randint(0, VOCABULARY, (b,), generator=gen), SHAPE, VOCABULARY, gen)
        logits = torch.randn(b * SHAPE.width, VOCABULARY, generator=gen)
        drawn = torch.randint(0, 1000, (2, b), generator=gen)
        return Drafts(tree, SHAPE), logits, drawn[0], drawn[1]

    drafts, logits, keys, lengths = inputs(1)
    graph, found = graph_emulator.EmulatedCapturer().capture(
        lambda: accept(drafts, logits, SamplingParams.greedy(b), keys, lengths, "joint", RATES)
    )
    others, *rest = inputs(2)
    for mine, theirs in zip((*drafts.tree, logits, keys, lengths), (*others.tree, *rest), strict=True):
        mine.copy_(theirs)
    graph.replay()
    wanted = accept(others, rest[0], SamplingParams.greedy(b), rest[1], rest[2], "joint", RATES)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
