"""Accept length of draft heads on responses that the target wrote itself, without an engine.

Temperature 0 is a walk: a round starts at the token where the last one ended, and a draft is right if it is the next
token of the response. This is what a server does, because the response is the target's own greedy answer. The first
round starts at the first generated token (prefill makes it); a round counts if the response is long enough for all of
its drafts.

Above 0 drafts are made at every `CONTEXT_STRIDE`-th token of a sampled response, and the accept length is an average
over these contexts. Trees follow the rule that is served (`core.gumbel`): the target draws its tokens with the noise
that the draft has used, once per context. Chains draw one token per step, and the probability that verification accepts
them is computed from the target's distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import verify_greedy
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.store.features import Taps
from eagle_plugin.learning.evaluate.acceptance import walked_nodes
from eagle_plugin.learning.evaluate.chains import chain_acceptance, graft_chains, sample_chains
from eagle_plugin.learning.evaluate.stats import AcceptCounts
from eagle_plugin.learning.reference.draft import HeadPrefill, draft_trees, prefill_head
from eagle_plugin.learning.reference.target import path_logits, tree_logits, window_length

CONTEXT_STRIDE = 4  # tokens from one context to the next at temperature > 0
MAX_KEYS = 1 << 15  # roots times keys of one call of the head, which bounds its memory
MAX_NODES = 640  # nodes that the target reads in one forward
CHECKED_TOKENS = 64  # the place of the tree that `check_tree_reading` reads, and how far beyond a window it is
LARGEST_DISTANCE = 0.1  # total variation between nodes read as a tree and alone; bf16 rounding gives 0.01 to 0.03
LEAST_STEPS, MOST_STEPS = 2, 15  # that a tree of 16 nodes with 4 children per node can have
Shapes = dict[str, Shape]  # by name, a chain and a tree


def shapes_of(steps: int) -> Shapes:
    """What is drafted at so many draft steps: a chain of as many tokens, and a tree of 16 nodes of as many levels."""
    return {f"chain{steps}": Shape.chain(steps), "tree16": Shape(steps=steps, topk=4, width=16)}


CPU_STEPS = 4  # drafts that are measured on a CPU; deeper ones are seldom accepted, and cost as much
SHAPES = shapes_of(CPU_STEPS)
CHAIN, TREE = SHAPES.values()


class Response(NamedTuple):
    """One response of the target with its hidden states."""

    row: TokenRow
    aux: Tensor | None  # [n, A * H], inputs of `Responses.aux_layers`
    last: Tensor  # [n, H]

    @property
    def tokens(self) -> list[int]:
        return self.row.prompt_ids + self.row.response_ids


class Responses:
    """The target's responses at one temperature, read once for all heads."""

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
        self.items: list[Response] = []
        with Taps(model, self.aux_layers) as taps:
            self.hidden_size = taps.hidden_size
            for row in rows:
                ids = row.prompt_ids + row.response_ids
                aux, last = taps.run(torch.tensor([ids]), [len(ids)])
                self.items.append(Response(row, None if aux is None else aux[0], last[0]))
                report(len(self.items))

    def features(self, response: Response, head: DraftHead) -> Tensor:
        """The target's features [n, F] that the head reads, at each token of a response."""
        if not head.aux_layers:
            return response.last
        assert response.aux is not None
        parts = response.aux.split(self.hidden_size, -1)
        return torch.cat([parts[self.aux_layers.index(layer)] for layer in head.aux_layers], -1)


@torch.no_grad()
def evaluate(
    head: DraftHead,
    responses: Responses,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
    shapes: Shapes = SHAPES,
) -> dict[str, list[AcceptCounts]]:
    """Measure a chain and a tree (`shapes_of`) on every response: under each name one entry per response, in order.

    At temperature 0 also the chain's name with `_everywhere`: a round at every token instead of a walk.
    """
    counts: dict[str, list[AcceptCounts]] = {}
    for i, response in enumerate(responses.items):
        measure = _expect if responses.temperature else _walk
        for name, (rounds, accepted) in measure(
            head, responses, response, torch.Generator().manual_seed(seed + i), shapes
        ).items():
            counts.setdefault(name, []).append(AcceptCounts(response.row.source, rounds, accepted))
        report(i + 1)
    return counts


Measured = dict[str, tuple[float, Tensor]]  # name -> rounds, and in how many k drafts or more were accepted


def _walk(head: DraftHead, responses: Responses, response: Response, gen: torch.Generator, shapes: Shapes) -> Measured:
    tokens, first, (chain, _) = response.tokens, len(response.row.prompt_ids), shapes.values()
    roots = torch.arange(first, max(first, len(tokens) - chain.steps), device=head.embedding.device)
    prefill = prefill_head(head, tokens, responses.features(response, head)) if len(roots) else None
    measured: Measured = {}
    for name, shape in shapes.items():
        accepted = greedy_accepted(head, tokens, prefill, roots, shape).tolist() if prefill else []
        measured[name] = count_accepted(walk_rounds(accepted), shape.steps)
        if shape == chain:
            measured[f"{name}_everywhere"] = count_accepted(accepted, shape.steps)
    return measured


def greedy_accepted(head: DraftHead, tokens: list[int], prefill: HeadPrefill, roots: Tensor, shape: Shape) -> Tensor:
    """How many drafts [b] int64 are accepted after each root if the target continues as the tokens do."""
    accepted = []
    text = torch.tensor(tokens, device=roots.device)
    for part in roots.split(max(1, MAX_KEYS // len(tokens))):
        params = SamplingParams.greedy(len(part), part.device)
        trees = draft_trees(head, tokens, prefill, part, params, torch.zeros_like(part), shape)
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


def _expect(
    head: DraftHead, responses: Responses, response: Response, gen: torch.Generator, shapes: Shapes
) -> Measured:
    tokens, first = response.tokens, len(response.row.prompt_ids)
    sums = {name: torch.zeros(shape.steps, dtype=torch.float64) for name, shape in shapes.items()}
    roots = torch.arange(first, max(first, len(tokens) - 1), CONTEXT_STRIDE, device=head.embedding.device)
    if len(roots):
        prefill = prefill_head(head, tokens, responses.features(response, head))
        chain, tree = shapes.values()
        for part in roots.split(MAX_NODES // (tree.width + chain.steps)):
            expected = expected_acceptance(
                head, responses.model, tokens, prefill, part, responses.temperature, gen, shapes
            )
            sums = {name: total + expected[name].sum(0).cpu() for name, total in sums.items()}
    return {name: (float(len(roots)), total) for name, total in sums.items()}


def expected_acceptance(
    head: DraftHead,
    model: Any,
    tokens: list[int],
    prefill: HeadPrefill,
    roots: Tensor,
    temperature: float,
    gen: torch.Generator,
    shapes: Shapes = SHAPES,
) -> dict[str, Tensor]:
    """By shape name: the probabilities [b, steps] float64 that k drafts or more are accepted after each root.

    The tree is one draw of the noise per root, which decides both the tree and what the target draws on it: 0 or 1.
    The chain is an expectation over the draw of the last draft and over the verification; the other drafts are drawn
    once. The mean over roots is that of an engine which starts a round at each of them.
    """
    (chain_name, chain), (tree_name, tree) = shapes.items()
    params = SamplingParams.of(len(roots), temperature, device=roots.device)
    keys = torch.randint(2**62, (len(roots),), generator=gen, device=gen.device).to(roots.device)
    trees = draft_trees(head, tokens, prefill, roots, params, keys, tree)
    drafts, q = sample_chains(head, prefill, roots, temperature, gen, chain.steps)
    # the distribution after the last draft is not needed, so the target does not read it
    grafted = graft_chains(trees, head.to_target(drafts[:, :-1]))
    logits = tree_logits(model, tokens, roots, grafted).float()
    W = trees.tokens.shape[1]
    reached = walked_nodes(trees, logits[:, :W], params, keys, roots)
    levels = torch.arange(1, tree.steps + 1, device=roots.device)
    to_target = head.to_target(torch.arange(len(head.d2t), device=roots.device))
    p = (torch.cat([logits[:, :1], logits[:, W:]], 1) / temperature).softmax(-1)
    return {
        tree_name: (reached[:, None] & (trees.depths[:, None] == levels[:, None])).any(-1).double(),
        chain_name: chain_acceptance(p, drafts, q, to_target),
    }


@torch.no_grad()
def check_tree_reading(model: Any, tokens: list[int]) -> None:
    """Raise DataError unless the target's distributions on a tree in one forward are those on its branches alone.

    With recurrent layers, or with attention that makes its own mask, they are not. The tree is beyond the longest
    window of the target's layers, so far as there are tokens.
    """
    device = model.device
    root = min(len(tokens) - 1, window_length(model) + CHECKED_TOKENS)
    # the root, two children of it, and a child of the first one
    tree = DraftTree(
        torch.tensor([[tokens[root], *tokens[:3]]], device=device),
        torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32, device=device),
        torch.tensor([[0, 1, 1, 2]], dtype=torch.int32, device=device),
        torch.tensor([[1, 3, 5, 11]], device=device),
    )
    together = tree_logits(model, tokens, torch.tensor([root], device=device), tree)[0].float().softmax(-1)
    alone = path_logits(model, tokens[: root + 1], tree).float().softmax(-1)
    apart = float((together - alone).abs().sum(-1).max() / 2)
    if not apart < LARGEST_DISTANCE:
        raise DataError(
            f"{type(model).__name__} cannot read a draft tree in one forward (its distributions differ by {apart:.2f} "
            "from those on single branches); temperature 0 reads no trees"
        )
