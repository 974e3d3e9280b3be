"""What one more forward of a P-EAGLE head would gain: trees of its marginals against trees of re-scored candidates.

    python benchmarks/rescoring.py --head out/head-peagle/head [--json out/rescoring.json]

A P-EAGLE head says of each level what comes there whatever was drafted before, so a path of tokens that are each likely
may be an unlikely text. Here the best `--candidates` nodes by these marginals are read by the same head in one more
forward: the row of a node reads the node's token, sees the text and the node's own path, and scores its children given
that path; the best are the tree. What else such a row reads is not defined for a head that was trained on real features
and masks: "state" is the head's state that the node was drafted from (as in EAGLE-3), "mask" its features of a mask.

The target writes greedy responses; the accept length (with the bonus token) is the mean over their tokens. gain: above
the tree of the marginals with as many nodes. "all candidates" is the most that a choice among them can reach. The
standard errors are those of another choice of prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.acceptance import generate_response, mean_and_error
from eagle_plugin.bench.choices import TARGET, parse_shape, resolve_target
from eagle_plugin.bench.questions import assign_rounds, read_questions
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree, select_tree
from eagle_plugin.core.verify import verify_greedy
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.layers import KeyValues
from eagle_plugin.learning.reference.decode import load_head
from eagle_plugin.learning.reference.draft import DraftTail, HeadPrefill, draft_trees, prefill_head
from eagle_plugin.learning.reference.rules import RULES
from eagle_plugin.learning.reference.target import target_features
from eagle_plugin.models.shipped import head_folder, question_files

FEATURES = ("state", "mask")
ROOTS = 8  # trees of one forward, which bounds the memory of their logits


class Context(NamedTuple):
    """Places of a text after which trees are drafted, as `draft_trees` takes them."""

    tokens: list[int]
    prefill: HeadPrefill
    roots: Tensor  # [b] int64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help=f"a model folder, or a name of the catalogue ({TARGET})")
    parser.add_argument("--head", required=True, help="a P-EAGLE head's folder")
    parser.add_argument("--shape", type=parse_shape, default=Shape(7, 4, 8), metavar="S/K/N", help="tree (7/4/8)")
    parser.add_argument("--candidates", type=int, default=24, help="nodes that are scored anew, the root included (24)")
    parser.add_argument("--prompts", type=int, default=24, help="questions of examples/prompts (24)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each response")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    (steps, _, width), most = options.shape, min(MAX_WIDTH, options.shape.candidates + 1)
    if steps < 2:
        parser.error(f"--shape {options.shape}: wanted at least 2 steps, as nothing is scored anew in one")
    if not width <= options.candidates <= most:
        parser.error(f"--candidates is {options.candidates}, wanted {width} to {most} for --shape {options.shape}")
    if options.tokens < steps + 2 or options.prompts < 1:
        parser.error(f"--tokens {options.tokens} --prompts {options.prompts}: wanted at least {steps + 2} and 1")
    return options


def rescore(head: DraftHead, context: Context, trees: DraftTree, levels: int, features: str) -> Tensor:
    """log p of the path to each node [b, N] float32 by one more forward of the head; 0 of the root, -inf of padding.

    levels: of the draft; features: one of `FEATURES`.
    """
    _, prefill, roots = context
    (b, N), n, device = trees.tokens.shape, len(prefill.states), roots.device
    tail = DraftTail(head, prefill, roots, levels)
    assert tail.depths is not None
    states = torch.cat([tail.current, tail.depths], dim=1)  # [b, D, H]: those that the nodes of a level come from
    level = (trees.depths[:, 1:].long() - 1).clamp(min=0)
    of_levels = states.gather(1, level[:, :, None].expand(-1, -1, states.shape[2]))
    hidden = of_levels if features == "state" else head.mask_state().expand_as(of_levels)
    text = (torch.arange(n, device=device) < roots[:, None])[:, None].expand(b, N - 1, n)
    path = (trees.ancestors[:, 1:, None] >> torch.arange(1, N, device=device) & 1).bool()
    past = [KeyValues(*(x.expand(b, *x.shape) for x in layer)) for layer in prefill.past]
    visible = torch.cat([text, path], dim=2)
    rows, _ = head(head.embed(trees.tokens[:, 1:]), hidden, roots[:, None] + level, visible, past)
    logp = head.logits(torch.cat([states[:, :1], rows], dim=1)).float().log_softmax(dim=-1)  # [b, N, D]
    ids = head.to_target(torch.arange(len(head.d2t), device=device))  # ascending
    drafts = torch.searchsorted(ids, trees.tokens).clamp(max=len(ids) - 1)
    each = torch.arange(b, device=device)
    parents = trees.parents.long().clamp(min=0)
    step = logp[each[:, None], parents, drafts].where(trees.parents >= 0, -torch.inf)
    scores = torch.zeros(b, N, device=device)
    for node in range(1, N):  # parents come before children
        scores[:, node] = scores[each, parents[:, node]] + step[:, node]
    return scores


def select(trees: DraftTree, scores: Tensor, width: int) -> DraftTree:
    """The best nodes [b, W] of trees [b, N] by these scores, in which no child is better than its parent."""
    tokens, parents, draws = trees.tokens[:, 1:], (trees.parents[:, 1:] - 1).clamp(min=-1), trees.draws[:, 1:]
    return select_tree(CandidateTable(scores[:, 1:], tokens, parents, draws), trees.tokens[:, 0], width)


def accept_lengths(context: Context, trees: DraftTree) -> Tensor:
    """The accept length [b] float64 of each tree, with the bonus token, if the target continues as the text does."""
    text = torch.tensor(context.tokens, device=context.roots.device)
    follows = (context.roots[:, None] + trees.depths + 1).clamp(max=len(text) - 1)
    return verify_greedy(trees.tokens, trees.parents, text[follows], MAX_WIDTH).lengths.double()


def compare(head: DraftHead, context: Context, shape: Shape, candidates: int) -> dict[str, Tensor]:
    """The accept length [b] of every tree, by the name of its row in the table."""
    params = SamplingParams.of(len(context.roots), 0.0)
    few, trees = (
        draft_trees(head, *context, RULES["target_only"], params, torch.Generator(), shape._replace(width=width))[0]
        for width in (shape.width, candidates)
    )
    found = {"marginals": accept_lengths(context, few)}
    for features in FEATURES:
        scores = rescore(head, context, trees, shape.steps, features)
        found[f"re-scored, {features}"] = accept_lengths(context, select(trees, scores, shape.width))
    return found | {"all candidates": accept_lengths(context, trees)}


def measure(
    model: Any, head: DraftHead, prompts: Sequence[list[int]], options: argparse.Namespace, end: int, bar: Progress
) -> list[dict[str, Any]]:
    """All rows of the table; the gain is above the first one. Raises UserError for a head without a mask token."""
    if head.mask_token_id is None:
        raise UserError(
            f"--head {options.head} is a head of kind {head.kind}, wanted a P-EAGLE head: others are autoregressive"
        )
    task = bar.add_task("prompts", total=len(prompts))
    found: dict[str, list[Tensor]] = {}
    names: list[str] = []
    for i, ids in enumerate(prompts):
        tokens = generate_response(model, ids, options.tokens, 0.0, end, torch.Generator())
        roots = torch.arange(len(ids), max(len(ids), len(tokens) - options.shape.steps - 1))
        names += [str(i)] * len(roots)
        prefill = prefill_head(head, tokens, target_features(model, head, tokens))
        for part in roots.split(ROOTS) if len(roots) else ():
            lengths = compare(head, Context(tokens, prefill, part), options.shape, options.candidates)
            for name, values in lengths.items():
                found.setdefault(name, []).append(values)
        bar.advance(task)
    if not found:
        raise UserError(f"no response has {options.shape.steps + 2} tokens; give more --prompts, or fewer levels")
    base, *_ = by_tree = {name: torch.cat(parts) for name, parts in found.items()}
    return [
        {"tree": name, "contexts": len(names)}
        | mean_and_error("accept_length", values, names)
        | mean_and_error("gain", values - by_tree[base], names)
        for name, values in by_tree.items()
    ]


@torch.no_grad()
def main() -> int:
    options, console = parse(), Console()
    folder = resolve_target(options.target, console)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    head = load_head(model, folder, head_folder(options.head), algorithm="EAGLE3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = list(chain.from_iterable(assign_rounds(read_questions(question_files()))))[: options.prompts]
    chats = [[{"role": "user", "content": question.prompt}] for question in questions]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    with Progress(console=console) as bar:
        rows = measure(model, head, prompts, options, tokenizer.eos_token_id, bar)
    title = f"accept length, {options.shape} of {options.candidates} (±: standard error over prompts)"
    table = Table("tree", "accept length", "gain", title=title)
    for row in rows:
        length, gain = f"{row['accept_length']:.3f}", f"{row['gain']:+.3f}"
        table.add_row(row["tree"], f"{length} ±{row['accept_length_error']:.3f}", f"{gain} ±{row['gain_error']:.3f}")
    console.print(table)
    if options.json:
        write_output(options.json, [json.dumps(rows, indent=1) + "\n"], "name another file with --json")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
