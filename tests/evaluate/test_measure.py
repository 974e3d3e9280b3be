"""Accept lengths without an engine, against a real speculative loop, Monte Carlo and plain decoding of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import dflash_models
import pytest
import tiny_models
import tiny_targets
import torch
from reference_decoder import plain_greedy, speculative_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import topk_log_softmax
from eagle_plugin.core.verify import verify_tree
from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.interpretations import Interpretation
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.evaluate.chains import chain_acceptance, forced_likelihoods, graft_chains, sample_chains
from eagle_plugin.learning.evaluate.measure import (
    CHAIN,
    TREE,
    Response,
    Responses,
    check_tree_reading,
    evaluate,
    expected_acceptance,
    greedy_accepted,
    walk_rounds,
)
from eagle_plugin.learning.reference import target
from eagle_plugin.learning.reference.draft import draft_trees, prefill_head, topk_log_probs
from eagle_plugin.learning.reference.target import target_features

PROMPT = [0, 40, 41, 99, 120, 77, 5]
TEMPERATURE, TRIALS = 4.0, 1400
SIGMAS = 4.5  # of the difference of two means: a right program fails with 7e-6


class Case(NamedTuple):
    model: Any
    head: DraftHead
    text: list[int]  # prompt and 48 greedy tokens


@pytest.fixture(scope="module")
def cases(
    tiny_target: Path, tiny_eagle3_reduced: Path, markov_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("heads")
    models = {
        path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (tiny_target, markov_target)
    }
    responses = {path: [*PROMPT, *plain_greedy(model, PROMPT, 48)] for path, model in models.items()}
    eagle2 = tiny_models.markov_eagle2_head(folder / "eagle2", markov_target, wrong=0.3)
    eagle3 = tiny_models.markov_eagle3_head(folder / "eagle3", markov_target, wrong=0.3, reduced=True)
    kept = sorted(set(tiny_models.read_markov_map(markov_target).tolist()))
    dflash = dflash_models.dflash_head(folder / "dflash", markov_target, kept, layers=4, wrong=6.0)
    heads = {
        "eagle2": (markov_target, load_any_head(eagle2, markov_target)),
        "eagle3": (markov_target, load_any_head(eagle3, markov_target)),
        "random": (
            tiny_target,
            load_any_head(tiny_eagle3_reduced, tiny_target, None, Interpretation((1, 4, 6), False, "")),
        ),
        "peagle": (tiny_target, new_head("peagle", tiny_target, aux_layers=(1, 4, 6), layers=2, mask_token_id=2)),
        "dflash": (markov_target, load_any_head(dflash, markov_target)),
    }
    with torch.no_grad():
        heads["peagle"][1].get_parameter("mask_hidden").normal_(generator=torch.Generator().manual_seed(0))
    return {name: Case(models[path], head, responses[path]) for name, (path, head) in heads.items()}


def read(case: Case) -> Any:
    return prefill_head(case.head, case.text, target_features(case.model, case.head, case.text))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(
            (name, shape)
            for name in ("eagle2", "eagle3", "random", "peagle")
            for shape in (CHAIN, TREE, Shape(3, 2, 6))
        ),
        ("dflash", CHAIN),
        pytest.param("dflash", TREE, marks=pytest.mark.matrix),
    ],
)
@torch.no_grad()
def test_walk_equals_a_speculative_loop(name: str, shape: Shape, cases: dict[str, Case]) -> None:
    case = cases[name]
    roots = torch.arange(len(PROMPT), len(case.text) - shape.steps)
    found = walk_rounds(greedy_accepted(case.head, case.text, read(case), roots, shape).tolist())
    loop = speculative_greedy(case.model, case.head, PROMPT, 48, shape)
    assert loop.tokens == case.text[len(PROMPT) :]
    assert found == [length - 1 for length in loop.accept_lengths][: len(found)]
    assert len(found) >= 44 // (shape.steps + 1)
    if name in ("eagle2", "eagle3", "dflash"):  # wrong now and then, so the walk is more than one long run
        assert min(found) < max(found) == shape.steps or shape == TREE


@torch.no_grad()
def test_tree_holds_the_chain(cases: dict[str, Case]) -> None:
    """A chain is the tree with one child per node, and cold sampling draws it; wider trees accept as much or more."""
    case = cases["eagle3"]
    roots, prefill = torch.arange(len(PROMPT), len(case.text) - CHAIN.steps), read(case)
    greedy = SamplingParams.greedy(len(roots))
    trees = draft_trees(case.head, case.text, prefill, roots, greedy, torch.zeros_like(roots), CHAIN)
    drafts, _ = sample_chains(case.head, prefill, roots, 1e-4, torch.Generator().manual_seed(0), CHAIN.steps)
    assert torch.equal(trees.tokens[:, 1:], case.head.to_target(drafts))
    chain, tree = (greedy_accepted(case.head, case.text, prefill, roots, shape) for shape in (CHAIN, TREE))
    assert (tree >= chain).all() and tree.sum() > chain.sum()


@torch.no_grad()
def test_parallel_drafts_are_those_of_one_causal_pass(cases: dict[str, Case]) -> None:
    """P-EAGLE as an engine runs it: mask tokens after the text, positions in a row, plain causal attention."""
    case = cases["peagle"]
    head, root = case.head, 20
    text, slots = case.text[: root + 1], CHAIN.steps - 1
    features = target_features(case.model, head, text)
    ids = torch.tensor([*text[1:], *[head.mask_token_id] * slots])
    hidden = torch.cat([head.fuse(features[:root]), head.mask_state().expand(slots, -1)])
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    states, _ = head(head.embed(ids), hidden, torch.arange(len(ids)), causal)
    wanted = head.to_target(head.logits(states[-CHAIN.steps :]).argmax(-1))
    roots = torch.tensor([root])
    trees = draft_trees(head, case.text, read(case), roots, SamplingParams.greedy(1), torch.zeros_like(roots), CHAIN)
    assert torch.equal(trees.tokens[0, 1:], wanted)
    assert len(set(wanted.tolist())) > 1


@pytest.mark.parametrize("shape", ["chain4", "tree16"])
@torch.no_grad()
def test_expectation_equals_monte_carlo(shape: str, cases: dict[str, Case]) -> None:
    """The share of rounds that accept k drafts or more, verified one by one, against what the evaluation says."""
    case = cases["eagle3"]
    prefill, logits = read(case), case.model(torch.arange(320)[:, None]).logits[:, 0]
    place = len(PROMPT) + 3
    expected = torch.cat([
        expected_acceptance(
            case.head, case.model, case.text, prefill, torch.full((30,), place), TEMPERATURE,
            torch.Generator().manual_seed(i),
        )[shape]
        for i in range(24)
    ])  # fmt: skip
    gen, roots = torch.Generator().manual_seed(99), torch.full((TRIALS,), place)
    simulate = simulate_chains if shape == "chain4" else simulate_trees
    accepted = simulate(case, prefill, roots, logits, gen)
    seen = (accepted[:, None] >= torch.arange(1, 5)).double()
    p = expected.mean(0)
    error = (expected.var(0) / len(expected) + p * (1 - p) / TRIALS).sqrt() + 1e-3
    assert ((p - seen.mean(0)).abs() < SIGMAS * error).all()
    assert 0.1 < float(p[0]) < 0.9  # drafts are accepted, and refused
    wrong = p[0] * 0.7  # negative control: this many trials show an error of 30 %
    assert abs(wrong - seen.mean(0)[0]) > SIGMAS * error[0]


def simulate_trees(case: Case, prefill: Any, roots: Tensor, logits: Tensor, gen: torch.Generator) -> Tensor:
    params = SamplingParams.of(len(roots), TEMPERATURE)
    keys = torch.randint(2**62, (len(roots),), generator=gen)
    trees = draft_trees(case.head, case.text, prefill, roots, params, keys, TREE)
    after = logits[trees.tokens].flatten(0, 1)
    return verify_tree(trees, after, params, keys, roots, TREE.steps + 1).lengths - 1


def simulate_chains(case: Case, prefill: Any, roots: Tensor, logits: Tensor, gen: torch.Generator) -> Tensor:
    drafts, q = sample_chains(case.head, prefill, roots, TEMPERATURE, gen, CHAIN.steps)
    tokens = torch.cat([torch.tensor(case.text)[roots][:, None], case.head.to_target(drafts)], 1)
    p = (logits / TEMPERATURE).softmax(-1)[tokens[:, :-1], tokens[:, 1:]]
    q = q.gather(2, drafts[:, :, None])[:, :, 0]
    return (torch.rand(p.shape, generator=gen) < p / q).cumprod(1).sum(1)


@torch.no_grad()
def test_head_that_is_the_target_is_never_refused() -> None:
    """p = q accepts everything; where they share no token nothing is accepted."""
    p = torch.rand(3, 4, 10, dtype=torch.float64).softmax(-1)
    drafts = torch.zeros(3, 4, dtype=torch.int64)
    torch.testing.assert_close(chain_acceptance(p, drafts, p, torch.arange(10)), torch.ones(3, 4).double())
    half = torch.zeros(3, 4, 10)
    half[:, :, :5] = 0.2
    assert chain_acceptance(half, drafts + 5, half.flip(2), torch.arange(10)).sum() == 0


@torch.no_grad()
def test_grafted_chain_is_a_branch_of_its_own(cases: dict[str, Case]) -> None:
    case = cases["random"]
    roots = torch.tensor([20])
    trees = draft_trees(
        case.head, case.text, read(case), roots, SamplingParams.greedy(1), torch.zeros_like(roots), Shape(2, 2, 4)
    )
    grafted = graft_chains(trees, torch.tensor([[7, 8, 9]]))
    assert grafted.parents[0, 4:].tolist() == [0, 4, 5] and grafted.depths[0, 4:].tolist() == [1, 2, 3]
    assert [bin(x) for x in grafted.ancestors[0, 4:].tolist()] == ["0b10001", "0b110001", "0b1110001"]


@torch.no_grad()
def test_forced_likelihoods_are_those_of_the_drafts(cases: dict[str, Case]) -> None:
    """Given its own drafts as the text, a head gives them the probabilities with which it drew them."""
    case = cases["random"]
    root = torch.tensor([20])
    drafts, q = sample_chains(case.head, read(case), root, 1.0, torch.Generator().manual_seed(1), 4)
    text = [*case.text[:21], *case.head.to_target(drafts)[0].tolist()]
    followed = case._replace(text=text)
    found = forced_likelihoods(case.head, text, read(followed), root, 4)
    torch.testing.assert_close(found, q.gather(2, drafts[:, :, None])[:, :, 0].log(), rtol=1e-4, atol=1e-4)
    outside = next(i for i in range(320) if i not in set(case.head.to_target(torch.arange(128)).tolist()))
    text[22] = outside
    assert forced_likelihoods(case.head, text, read(followed), root, 4)[0].isnan().tolist() == [
        False,
        True,
        *[False] * 2,
    ]


def test_topk_log_probs_is_the_whole_sort() -> None:
    gen = torch.Generator().manual_seed(0)
    for logits in (
        torch.randn(40, 500, generator=gen),
        torch.randint(0, 4, (40, 500), generator=gen).float(),  # equal logits on both sides of every cut
        torch.randn(40, 500, generator=gen).bfloat16(),
        torch.where(torch.rand(40, 500, generator=gen) < 0.9, torch.nan, 1.0),
    ):
        for k in (1, 4, 128, 500):
            for found, wanted in zip(topk_log_probs(logits, k), topk_log_softmax(logits, k), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def row(case: Case, temperature: float = 0.0, n: int = 48) -> TokenRow:
    return TokenRow("1", "here", case.text[: len(PROMPT)], case.text[len(PROMPT) :][:n], "length", "val", temperature)


def test_evaluation_of_responses(cases: dict[str, Case]) -> None:
    """Several heads share one prefill of the responses; a response that is too short for a round has no counts."""
    eagle2, eagle3 = cases["eagle2"], cases["eagle3"]
    layers = sorted({*eagle3.head.aux_layers, 5})
    responses = Responses(eagle3.model, [row(eagle3), row(eagle3, n=3), row(eagle3, n=0)], layers, 0.0)
    assert torch.equal(
        responses.features(responses.items[0], eagle3.head), target_features(eagle3.model, eagle3.head, eagle3.text)
    )
    for case in (eagle2, eagle3):
        counts = evaluate(case.head, responses)
        assert set(counts) == {"chain4", "chain4_everywhere", "tree16"}
        for count in counts.values():
            assert [t.rounds > 0 for t in count] == [True, False, False] and count[0].domain == "here"
        assert counts["tree16"][0].accepted.sum() / counts["tree16"][0].rounds > 3


def test_shuffled_vocabulary_accepts_nothing(cases: dict[str, Case]) -> None:
    """Negative control: the same head with another d2t drafts other tokens."""
    case = cases["eagle3"]
    responses = [Responses(case.model, [row(case, t)], case.head.aux_layers, t) for t in (0.0, 1.0)]
    right = [evaluate(case.head, text)["tree16"][0] for text in responses]
    d2t = case.head.d2t
    try:
        ids = case.head.to_target(torch.arange(len(d2t)))
        case.head.d2t = ids.roll(1) - torch.arange(len(d2t))
        wrong = [evaluate(case.head, text)["tree16"][0] for text in responses]
    finally:
        case.head.d2t = d2t
    for a, b in zip(right, wrong, strict=True):
        assert float(a.accepted[0] / a.rounds) > 0.8 and float(b.accepted[0] / b.rounds) < 0.2


def test_target_that_ignores_the_tree_is_refused(cases: dict[str, Case]) -> None:
    case = cases["random"]
    check_tree_reading(case.model, case.text)

    class Deaf:
        device, dtype, config = torch.device("cpu"), torch.float32, case.model.config

        def __call__(self, ids: Tensor, **options: Any) -> Any:
            options.pop("attention_mask", None)
            return case.model(ids, **options)

    with pytest.raises(DataError, match="cannot read a draft tree in one forward"):
        check_tree_reading(Deaf(), case.text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "llama4_text", "mistral"])
def test_windows_are_kept_in_trees(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eager` attention, which GPT-OSS has alone, adds the mask to the scores."""
    model = tiny_targets.tiny_target(family, dtype=dtype)
    text = torch.randint(3, 131, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    for name in ("eager", *([] if family == "gpt_oss" else ["sdpa"])):
        model.set_attn_implementation(name)
        check_tree_reading(model, text)
    monkeypatch.setattr(target, "_window", lambda config: 0)
    monkeypatch.setattr(target, "_chunk", lambda config: 2**20)
    with pytest.raises(DataError, match="cannot read a draft tree"):  # negative control
        check_tree_reading(model, text)


def test_a_text_knows_its_tokens(cases: dict[str, Case]) -> None:
    assert Response(row(cases["random"]), None, torch.zeros(1)).tokens == cases["random"].text
