"""Records rounds for `benchmarks.node_budgets`: the shipped head on sampled responses of its target."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.acceptance import Response, distribution, generate_responses
from benchmarks.node_budgets_rounds import Rounds
from benchmarks.simulate_traces import CAPS
from eagle_plugin.bench.choices import TARGET, resolve_target
from eagle_plugin.bench.questions import assign_rounds, read_questions
from eagle_plugin.core.propose import Proposals
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import CandidateTable, DraftTree, select_tree
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.evaluate.acceptance import reach_probabilities
from eagle_plugin.learning.reference.decode import load_head
from eagle_plugin.learning.reference.draft import draft_candidates
from eagle_plugin.learning.reference.rules import RULES
from eagle_plugin.learning.reference.target import tree_logits
from eagle_plugin.models.shipped import HEAD, head_folder, question_files

CHUNK = 4  # positions whose chances are computed at once: each has a row of the vocabulary per candidate


@torch.no_grad()
def record(prompts: int, tokens: int, temperature: float, console: Console) -> Rounds:
    """Rounds at every other token of the responses to `prompts` questions of examples/prompts."""
    folder = resolve_target(TARGET, console)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    head = load_head(model, folder, head_folder(HEAD), algorithm="EAGLE3")
    questions = list(chain.from_iterable(assign_rounds(read_questions(question_files()))))[:prompts]
    options = argparse.Namespace(tokens=tokens, seed=0)
    parts, starts, gen = [], [0], torch.Generator().manual_seed(0)
    with Progress(console=console) as bar:
        responses = generate_responses(
            model, head, AutoTokenizer.from_pretrained(folder), questions, options, temperature
        )
        for response in bar.track(responses, total=len(questions), description=f"temperature {temperature:g}"):
            parts.append(record_response(model, head, response, temperature, gen))
            starts.append(starts[-1] + len(response.roots))
    scores, reach = (torch.cat(values).float().numpy() for values in zip(*parts, strict=True))
    return Rounds(scores, reach, np.array(starts[:-1], dtype=np.int32))


def record_response(
    model: Any, head: DraftHead, response: Response, temperature: float, gen: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The scores [T, C] of all candidates after each root of a response, and the chances [T, C] that they are reached.

    The candidates are those of the product's rule, `core.propose`.
    """
    params = SamplingParams.of(len(response.roots), temperature)
    table, proposals = draft_candidates(
        head, response.tokens, response.prefill, response.roots, RULES["sampled_child"], params, gen, CAPS
    )
    roots = torch.tensor(response.tokens)[response.roots]
    proposing, place = proposing_nodes(table, roots)
    logits = tree_logits(model, response.tokens, response.roots, proposing)
    reach = []
    for part in torch.arange(len(roots)).split(CHUNK):
        p = distribution(logits[part], temperature)
        p = p[torch.arange(len(part))[:, None], place[part]]  # a leaf has the root's, which is not read
        drawn = Proposals(*(values[part] for values in proposals))
        reach.append(reach_probabilities(whole_tree(table, roots).take(part), p, drawn)[:, 1:])
    return table.scores, torch.cat(reach)


def proposing_nodes(table: CandidateTable, roots: Tensor) -> tuple[DraftTree, Tensor]:
    """The tree of the candidates that have children, and for each node of `whole_tree` its node there, 0 for a leaf."""
    b, C = table.scores.shape
    has_children = torch.zeros(b, C + 1, dtype=torch.bool).scatter_(1, table.parents.long() + 1, True)
    nodes = int(has_children[0].sum())
    order = torch.where(has_children[:, 1:], -torch.arange(C, dtype=torch.float32), -torch.inf)
    tree = select_tree(table._replace(scores=order), roots, nodes)
    return tree, torch.where(has_children, has_children.cumsum(1) - 1, 0)


def whole_tree(table: CandidateTable, roots: Tensor) -> DraftTree:
    """All candidates as one tree per root; it has too many nodes for ancestor bitmasks, which are 0."""
    b = len(roots)
    none = torch.full((b, 1), -1, dtype=torch.int32)
    tokens = torch.cat([roots[:, None], table.tokens], 1)
    zeros = torch.zeros_like(tokens)
    parents, draws = torch.cat([none, table.parents + 1], 1), torch.cat([none, table.draws], 1)
    return DraftTree(tokens, parents, zeros.int(), zeros, draws)
