"""Accept length of draft heads on texts that the target wrote itself, without an engine.

Temperature 0 is a walk: a round starts at the token where the last one ended, and a draft is right if it is the text's
next token. That is what a server does, for the text is the target's own greedy answer. The first round starts at the
first generated token (prefill makes it); a round counts if the text is long enough for all of its drafts.

Above 0 the accept length is an expectation: at every `STRIDE`-th token of a sampled answer drafts are made, and the
probability that verification accepts them is computed from the target's distribution after each of them. Trees follow
the product's rule (`core.propose`), chains draw one token a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import verify_greedy
from eagle_plugin.data.rows import DataError, TokenRow
from eagle_plugin.data.store.features import Taps
from eagle_plugin.evaluate.acceptance import reach_probabilities
from eagle_plugin.evaluate.chains import chain_acceptance, graft_chains, sample_chains
from eagle_plugin.evaluate.stats import Tally
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.reference.decode import sampling_params
from eagle_plugin.reference.draft import Reading, draft_trees, read_text
from eagle_plugin.reference.rules import RULES
from eagle_plugin.reference.target import path_logits, tree_logits

STRIDE = 4  # tokens from one context to the next at temperature > 0
KEYS = 1 << 15  # roots times keys of one call of the head: bounds its memory
TREE_ROWS = 640  # nodes that the target reads in one forward
LARGEST_DISTANCE = 0.1  # total variation between a tree's rows read together and alone: bf16 makes 0.01 to 0.03


class Shape(NamedTuple):
    """The engine's flags: levels, children and kept nodes a level, nodes verified with the root."""

    steps: int
    topk: int
    draft_tokens: int


CHAIN, TREE = Shape(4, 1, 5), Shape(4, 4, 16)
SHAPES = {"chain4": CHAIN, "tree16": TREE}


class Text(NamedTuple):
    """One answer of the target with its hidden states."""

    row: TokenRow
    aux: Tensor | None  # [n, A * H], inputs of `Texts.aux_layers`
    last: Tensor  # [n, H]

    @property
    def tokens(self) -> list[int]:
        return self.row.prompt_ids + self.row.response_ids


class Texts:
    """The target's answers at one temperature, read once for all heads."""

    def __init__(
        self,
        model: Any,
        rows: Sequence[TokenRow],
        aux_layers: Sequence[int],
        temperature: float,
        report: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Run the target over every row; aux_layers: those of all heads, ascending; report gets the rows done."""
        self.model, self.temperature, self.aux_layers = model, temperature, tuple(aux_layers)
        self.texts: list[Text] = []
        with Taps(model, self.aux_layers) as taps:
            self.hidden_size = taps.hidden_size
            for row in rows:
                ids = row.prompt_ids + row.response_ids
                aux, last = taps.run(torch.tensor([ids]), [len(ids)])
                self.texts.append(Text(row, None if aux is None else aux[0], last[0]))
                report(len(self.texts))

    def features(self, text: Text, head: DraftHead) -> Tensor:
        """What the head reads of the target at each token of a text [n, F]."""
        if not head.aux_layers:
            return text.last
        assert text.aux is not None
        parts = text.aux.split(self.hidden_size, -1)
        return torch.cat([parts[self.aux_layers.index(layer)] for layer in head.aux_layers], -1)


@torch.no_grad()
def evaluate(
    head: DraftHead, texts: Texts, seed: int = 0, report: Callable[[int], None] = lambda done: None
) -> dict[str, list[Tally]]:
    """Measure `chain4` and `tree16` on every text; one tally a text under each name, in the order of the texts.

    At temperature 0 also `chain4_everywhere`: a round at every token instead of a walk.
    """
    tallies: dict[str, list[Tally]] = {}
    for i, text in enumerate(texts.texts):
        measure = _expect if texts.temperature else _walk
        for name, (rounds, accepted) in measure(head, texts, text, torch.Generator().manual_seed(seed + i)).items():
            tallies.setdefault(name, []).append(Tally(text.row.source, rounds, accepted))
        report(i + 1)
    return tallies


Measured = dict[str, tuple[float, Tensor]]  # name -> rounds, and in how many k drafts or more were accepted


def _walk(head: DraftHead, texts: Texts, text: Text, gen: torch.Generator) -> Measured:
    tokens, first = text.tokens, len(text.row.prompt_ids)
    roots = torch.arange(first, max(first, len(tokens) - CHAIN.steps), device=head.embedding.device)
    reading = read_text(head, tokens, texts.features(text, head)) if len(roots) else None
    measured: Measured = {}
    for name, shape in SHAPES.items():
        accepted = greedy_accepted(head, tokens, reading, roots, shape).tolist() if reading else []
        measured[name] = count_accepted(walk_rounds(accepted), shape.steps)
        if shape == CHAIN:
            measured[f"{name}_everywhere"] = count_accepted(accepted, shape.steps)
    return measured


def greedy_accepted(head: DraftHead, tokens: list[int], reading: Reading, roots: Tensor, shape: Shape) -> Tensor:
    """How many drafts [b] int64 are accepted behind each root if the target goes on as the text does."""
    accepted = []
    text = torch.tensor(tokens, device=roots.device)
    for part in roots.split(max(1, KEYS // len(tokens))):
        params = _params(0.0, part, head)
        trees, _ = draft_trees(
            head, tokens, reading, part, RULES["target_only"], params, torch.Generator(), **shape._asdict()
        )
        follows = (part[:, None] + trees.depths + 1).clamp(max=len(tokens) - 1)
        accepted.append(verify_greedy(trees.tokens, trees.parents, text[follows], shape.steps + 1).lengths.long() - 1)
    return torch.cat(accepted)


def walk_rounds(accepted: list[int]) -> list[int]:
    """The accepted drafts of each round of a walk, given those of a round at every token."""
    rounds, place = [], 0
    while place < len(accepted):
        rounds.append(accepted[place])
        place += accepted[place] + 1
    return rounds


def count_accepted(rounds: list[int], steps: int) -> tuple[float, Tensor]:
    """The number of rounds, and in how many of them k drafts or more were accepted [steps] float64."""
    counts = torch.tensor([sum(accepted >= k for accepted in rounds) for k in range(1, steps + 1)])
    return float(len(rounds)), counts.double()


def _expect(head: DraftHead, texts: Texts, text: Text, gen: torch.Generator) -> Measured:
    tokens, first = text.tokens, len(text.row.prompt_ids)
    sums = {name: torch.zeros(shape.steps, dtype=torch.float64) for name, shape in SHAPES.items()}
    roots = torch.arange(first, max(first, len(tokens) - 1), STRIDE, device=head.embedding.device)
    if len(roots):
        reading = read_text(head, tokens, texts.features(text, head))
        for part in roots.split(TREE_ROWS // (TREE.draft_tokens + CHAIN.steps)):
            expected = expected_acceptance(head, texts.model, tokens, reading, part, texts.temperature, gen)
            sums = {name: total + expected[name].sum(0).cpu() for name, total in sums.items()}
    return {name: (float(len(roots)), total) for name, total in sums.items()}


def expected_acceptance(
    head: DraftHead,
    model: Any,
    tokens: list[int],
    reading: Reading,
    roots: Tensor,
    temperature: float,
    gen: torch.Generator,
) -> dict[str, Tensor]:
    """The probabilities [b, steps] float64 that k drafts or more are accepted behind each root, by name of the shape.

    The drafts are drawn once; the mean over roots is that of an engine which starts a round at each of them.
    """
    params = _params(temperature, roots, head)
    trees, proposals = draft_trees(head, tokens, reading, roots, RULES["sampled_child"], params, gen, **TREE._asdict())
    drafts, q = sample_chains(head, reading, roots, temperature, gen, CHAIN.steps)
    # what the last draft leads to decides nothing, so the target need not read it
    grafted = graft_chains(trees, head.to_target(drafts[:, :-1]))
    p = (tree_logits(model, tokens, roots, grafted).float() / temperature).softmax(-1)
    W = trees.tokens.shape[1]
    reached = reach_probabilities(trees, p[:, :W], proposals)
    levels = torch.arange(1, TREE.steps + 1, device=roots.device)
    to_target = head.to_target(torch.arange(len(head.d2t), device=roots.device))
    chain = torch.cat([p[:, :1], p[:, W:]], 1)
    return {
        "tree16": (reached[:, None] * (trees.depths[:, None] == levels[:, None])).sum(-1),
        "chain4": chain_acceptance(chain, drafts, q, to_target),
    }


@torch.no_grad()
def check_tree_reading(model: Any, tokens: list[int]) -> None:
    """Raise DataError unless the target, given a tree at once, says what it says on each of its branches alone.

    Recurrent layers, and attention that makes its own mask, do not.
    """
    device = model.device
    root = min(len(tokens) - 1, 64)
    # the root, two children of it and a child of the first
    tree = DraftTree(
        torch.tensor([[tokens[root], *tokens[:3]]], device=device),
        torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32, device=device),
        torch.tensor([[0, 1, 1, 2]], dtype=torch.int32, device=device),
        torch.tensor([[1, 3, 5, 11]], device=device),
        torch.full((1, 4), -1, dtype=torch.int32, device=device),
    )
    together = tree_logits(model, tokens, torch.tensor([root], device=device), tree)[0].float().softmax(-1)
    alone = path_logits(model, tokens[: root + 1], tree).float().softmax(-1)
    apart = float((together - alone).abs().sum(-1).max() / 2)
    if not apart < LARGEST_DISTANCE:
        raise DataError(
            f"{type(model).__name__} cannot read a draft tree in one forward (its distributions differ by {apart:.2f} "
            "from those on single branches); evaluate at --temperatures 0, which reads no trees"
        )


def _params(temperature: float, roots: Tensor, head: DraftHead) -> SamplingParams:
    params = sampling_params(temperature, len(head.embedding), len(roots))
    return SamplingParams(*(values.to(roots.device) for values in params))
