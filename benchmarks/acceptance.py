"""Tokens per round of trees and of chains of as many nodes: the head of examples/heads on real text, without an engine.

    python benchmarks/acceptance.py [--json out/acceptance.json]
    python benchmarks/acceptance.py --head smollm2-135m-instruct-peagle --dtype float32

The target (SmolLM2-135M-Instruct, bf16) generates responses at each temperature. At every other token of them all are
drafted, so that they are compared at the same contexts, and every context counts once. (A server starts its rounds
where the last one ended, which is another average of the same values.) The root counts as a node, the bonus token as an
accepted one. A tree of N nodes should accept no less than a chain of N nodes.

chain: at temperature 0 the most likely tokens; above it tokens drawn from the head's distribution, verified token by
token (Leviathan et al., arXiv 2211.17192). chain, block: the same drafts, verified in one block (Sun et al., arXiv
2403.10444). tree (at temperature 0) and tree, deterministic: the head's most likely tokens (EAGLE-2), of which a walk
follows those that the target draws. tree, shared noise: the rule that is served (docs/sampling.md).

The trees of one context are cut from one table of candidates: a smaller one is the best part of a larger one. Accept
lengths of chains and of deterministic trees are expectations over the verification; with shared noise a tree and its
noise give one path, so that a value varies more. of_chain: a tree's accept length above the better chain's. The
standard errors are those of another choice of prompts: 1,000 bootstrap samples, contexts of a prompt kept together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from eagle_plugin.bench.choices import TARGET, resolve_target
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.core.propose import SHARPNESS
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree, select_tree
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.data.rows import TokenRow
from eagle_plugin.learning.evaluate.acceptance import reach_probabilities, walked_nodes
from eagle_plugin.learning.evaluate.chains import chain_acceptance, graft_chains, sample_chains
from eagle_plugin.learning.evaluate.responses import chat_ids, generate_responses
from eagle_plugin.learning.reference.draft import HeadPrefill, draft_candidates, prefill_head
from eagle_plugin.learning.reference.target import target_features, tree_logits
from eagle_plugin.models.shipped import HEAD, head_folder, question_files

NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
TREE, CHAIN = Shape(16, 4, NODES[-1]), Shape.chain(NODES[-1] - 1)


class Contexts(NamedTuple):
    """Places of one text, after each of which something is drafted."""

    prompt: str
    model: Any
    head: DraftHead
    tokens: list[int]
    prefill: HeadPrefill
    roots: Tensor  # [contexts] int64
    temperature: float

    def candidates(self, params: SamplingParams, *drafting: Any) -> CandidateTable:
        """Those of one tree per context; drafting: the other arguments of `draft_candidates`."""
        return draft_candidates(self.head, self.tokens, self.prefill, self.roots, params, *drafting)

    def root_tokens(self) -> Tensor:
        """[contexts] int64."""
        return torch.tensor(self.tokens)[self.roots]

    def logits(self, trees: DraftTree) -> Tensor:
        """The target's [contexts, W, V] float32 after their nodes."""
        return tree_logits(self.model, self.tokens, self.roots, trees).float()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help=f"a model folder, or a name of the catalogue ({TARGET})")
    parser.add_argument("--head", default=HEAD, help=f"an EAGLE-3 head's folder or name ({HEAD})")
    parser.add_argument(
        "--prompts", type=int, default=24, help="questions of examples/prompts, taken from every group in turn"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each response")
    parser.add_argument("--draws", type=int, default=3, help="chains and trees with noise per context")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--sharpness", type=float, default=SHARPNESS, help="of core/propose.py")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    for name in ("prompts", "draws"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, wanted at least 1")
    if options.tokens < 2:
        parser.error(f"--tokens is {options.tokens}, wanted at least 2: a tree's root is a generated token")
    return options


def generate_contexts(
    model: Any,
    head: DraftHead,
    tokenizer: Any,
    prompts: list[Question],
    options: argparse.Namespace,
    temperature: float,
) -> Iterator[Contexts]:
    rows = [TokenRow(one.id, one.group, chat_ids(tokenizer, one.prompt), [], "", "val") for one in prompts]
    ends = [tokenizer.eos_token_id]
    for row in generate_responses(model, rows, temperature, options.tokens, options.seed, ends):
        tokens = row.prompt_ids + row.response_ids
        roots = torch.arange(len(row.prompt_ids), len(tokens) - 1, 2)
        if len(roots):
            prefill = prefill_head(head, tokens, target_features(model, head, tokens))
            yield Contexts(row.id, model, head, tokens, prefill, roots, temperature)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) [..., V] float32; at temperature 0 all of it on the argmax."""
    if temperature:
        return (logits.float() / temperature).softmax(-1)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def by_nodes(reached: Tensor, table: CandidateTable) -> Tensor:
    """Accept lengths [contexts, NODES] float64 of the trees that a table's best candidates are.

    reached [contexts, W]: how often a walk in the largest tree comes to each node. In a smaller tree it takes the same
    way, as far as there are nodes.
    """
    best = table.scores.sort(dim=1, descending=True, stable=True).indices[:, : reached.shape[1] - 1]
    sizes = pad(best.argsort(dim=1) + 2, (1, 0), value=1)  # of the smallest tree with each node
    return torch.stack([(reached * (sizes <= nodes)).sum(1).double() for nodes in NODES], dim=1)


def deterministic(contexts: Contexts, shape: Shape) -> Tensor:
    """Accept lengths [contexts, NODES] float64 of trees or chains of the head's most likely tokens."""
    params = SamplingParams.greedy(len(contexts.roots))
    table = contexts.candidates(params, torch.zeros_like(contexts.roots), shape)
    trees = select_tree(table, contexts.root_tokens(), shape.width)
    return by_nodes(reach_probabilities(trees, distribution(contexts.logits(trees), contexts.temperature)), table)


def shared_noise(contexts: Contexts, sharpness: float, gen: torch.Generator) -> Tensor:
    """Accept lengths [contexts, NODES] float64 of trees whose draft has the noise of the target's draws."""
    params = SamplingParams.of(len(contexts.roots), contexts.temperature)
    keys = torch.randint(2**62, (len(contexts.roots),), generator=gen)
    table = contexts.candidates(params, keys, TREE, sharpness)
    trees = select_tree(table, contexts.root_tokens(), TREE.width)
    return by_nodes(walked_nodes(trees, contexts.logits(trees), params, keys, contexts.roots), table)


def drawn_chains(contexts: Contexts, gen: torch.Generator) -> dict[str, Tensor]:
    """Accept lengths [contexts, NODES] float64 of drawn chains: verified token by token, and in one block."""
    head, temperature = contexts.head, contexts.temperature
    drafts, q = sample_chains(head, contexts.prefill, contexts.roots, temperature, gen, CHAIN.steps)
    # the distribution after the last draft is not needed, so the target does not read it
    chains = graft_chains(DraftTree.padding(contexts.root_tokens(), 1), head.to_target(drafts[:, :-1]))
    p = distribution(contexts.logits(chains), temperature)
    to_target = head.to_target(torch.arange(len(head.d2t)))
    one_by_one = 1 + chain_acceptance(p, drafts, q, to_target).cumsum(1)
    return {
        "chain": one_by_one[:, [nodes - 2 for nodes in NODES]],
        "chain, block": torch.stack(list(block_lengths(p, drafts, q, to_target)), dim=1),
    }


def block_lengths(p: Tensor, drafts: Tensor, q: Tensor, to_target: Tensor) -> Iterator[Tensor]:
    """By NODES the expected accept lengths [b] float64 under block verification (arXiv 2403.10444, algorithm 2).

    The arguments are those of `chain_acceptance`; for the last draft of a block the mean over its draw too.
    """
    p, q = p[:, :, to_target].double(), q.double()
    b, n = drafts.shape
    p_drawn, q_drawn = (x.gather(2, drafts[:, :, None])[:, :, 0] for x in (p, q))
    kept = [torch.ones(b, dtype=torch.float64)]  # p_j of the paper
    inner, last = [], []  # h_j of a draft that is not the last one of its block, and of one that is
    for j in range(n):
        ahead = kept[j][:, None] * p[:, j]
        if j:
            above = (ahead - q[:, j]).clamp(min=0).sum(1) + kept[j] * (1 - p[:, j].sum(1)).clamp(min=0)
            inner.append(above / (above + 1 - kept[j]).clamp(min=1e-300))
        last.append(torch.minimum(ahead, q[:, j]).sum(1))
        kept.append((kept[j] * p_drawn[:, j] / q_drawn[:, j]).clamp(max=1))
    for nodes in NODES:
        stops = torch.stack([1 - h for h in [*inner[: nodes - 2], last[nodes - 2]]], dim=1)
        reached = 1 - stops.flip(1).cumprod(dim=1).flip(1)  # that a block of j drafts or more is accepted
        yield 1 + reached.sum(dim=1)


def accept_lengths(contexts: Contexts, options: argparse.Namespace, gen: torch.Generator) -> dict[str, Tensor]:
    """The accept lengths [contexts, NODES] float64 by rule; where drafts are drawn the mean of several draws."""
    if not contexts.temperature:
        return {"chain": deterministic(contexts, CHAIN), "tree": deterministic(contexts, TREE)}
    chains = [drawn_chains(contexts, gen) for _ in range(options.draws)]
    trees = [shared_noise(contexts, options.sharpness, gen) for _ in range(options.draws)]
    found = {name: torch.stack([draw[name] for draw in chains]).mean(0) for name in chains[0]}
    return found | {
        "tree, deterministic": deterministic(contexts, TREE),
        "tree, shared noise": torch.stack(trees).mean(0),
    }


def mean_and_error(key: str, values: Tensor, prompts: list[str]) -> dict[str, float]:
    """The mean over contexts and its bootstrap standard error over prompts, as `key` and `key`_error."""
    names = sorted(set(prompts))
    of = torch.tensor([names.index(prompt) for prompt in prompts])
    sums, counts = torch.zeros(len(names), dtype=torch.float64).index_add_(0, of, values), torch.bincount(of)
    picks = torch.randint(len(names), (1000, len(names)), generator=torch.Generator().manual_seed(0))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    return {key: round(float(values.mean()), 4), f"{key}_error": round(float(means.std()), 4)}


def measure(
    model: Any, head: DraftHead, tokenizer: Any, prompts: list[Question], options: argparse.Namespace, bar: Progress
) -> list[dict[str, Any]]:
    """All rows of the table."""
    rows = []
    for temperature in options.temperatures:
        task = bar.add_task(f"temperature {temperature:g}", total=len(prompts))
        parts: list[dict[str, Tensor]] = []
        names: list[str] = []
        gen = torch.Generator().manual_seed(options.seed)
        for contexts in generate_contexts(model, head, tokenizer, prompts, options, temperature):
            names += [contexts.prompt] * len(contexts.roots)
            parts.append(accept_lengths(contexts, options, gen))
            bar.advance(task)
        bar.update(task, completed=len(prompts))
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for i, nodes in enumerate(NODES):
            best = max((of[:, i] for name, of in found.items() if "chain" in name), key=Tensor.mean)
            for name, of in found.items():
                row = {"temperature": temperature, "rule": name, "nodes": nodes, "contexts": len(of)}
                row |= mean_and_error("accept_length", of[:, i], names)
                rows.append(row if "chain" in name else row | mean_and_error("of_chain", of[:, i] - best, names))
    return rows


def table(rows: list[dict[str, Any]], temperature: float) -> Table:
    """The rows of one temperature."""
    found = {(row["nodes"], row["rule"]): row for row in rows if row["temperature"] == temperature}
    rules = dict.fromkeys(rule for _, rule in found)
    out = Table(title=f"accept length at temperature {temperature:g}; in brackets: above the better chain's")
    for column in ("nodes", *rules):
        out.add_column(column, justify="right")
    for nodes in dict.fromkeys(nodes for nodes, _ in found):
        out.add_row(str(nodes), *(cell(found[nodes, rule]) for rule in rules))
    return out


def cell(row: dict[str, Any]) -> str:
    text = f"{row['accept_length']:.3f} ±{row['accept_length_error']:.3f}"
    return text + (f" ({row['of_chain']:+.3f} ±{row['of_chain_error']:.3f})" if "of_chain" in row else "")


@torch.no_grad()
def main() -> None:
    options, console = parse(), Console()
    folder = resolve_target(options.target, console)
    settings = {"dtype": getattr(torch, options.dtype), "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(folder, **settings).eval()
    head = load_any_head(head_folder(options.head), folder, model.dtype)
    questions = read_questions(question_files())
    prompts = list(chain.from_iterable(assign_rounds(questions)))[: options.prompts]
    with Progress(console=console) as bar:
        rows = measure(model, head, AutoTokenizer.from_pretrained(folder), prompts, options, bar)
    for temperature in options.temperatures:
        console.print(table(rows, temperature))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
        console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()
