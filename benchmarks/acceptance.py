"""Tokens per round under each rule of sampled verification: the head of examples/heads on real text.

    python benchmarks/acceptance.py [--json out/acceptance.json]
    python benchmarks/acceptance.py --tables chains --head smollm2-135m-instruct-peagle --dtype float32

The target (SmolLM2-135M-Instruct, bf16) generates responses at each temperature. At every other token of them each rule
drafts trees, and the probability that the walk reaches a node is computed from the target's own distribution; only the
draft's draws are sampled. So all rules are compared at the same contexts, and every context counts once. (A server
starts its rounds where the last one ended, which is another average of the same values.)

per_node: probability that one of four children of the root is accepted. accept_length: with the bonus token; 8 nodes
are drafted in 2 steps, 16 in 4, topk 4. gain: accept length above the deterministic rule's. The standard errors are
those of another choice of prompts: 1,000 bootstrap samples over the prompts, contexts kept together.

The second table (acceptance_chains.py) has trees of 2 to 32 nodes beside chains of as many, as engines draft. gumbel:
the draft shares the noise of the target's draws (core/gumbel.py). of_chain: a tree's accept length above the better
chain's.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.acceptance_chains import (
    NODES,
    Contexts,
    Lengths,
    chains,
    chains_table,
    coupled_trees,
    distribution,
    drawn_trees,
)
from eagle_plugin.bench.choices import TARGET, resolve_target
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.core.gumbel import SHARPNESS
from eagle_plugin.core.propose import SLOT_WEIGHTS
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.evaluate.acceptance import expected_accept_length
from eagle_plugin.learning.reference.decode import load_head
from eagle_plugin.learning.reference.draft import HeadPrefill, draft_trees, prefill_head
from eagle_plugin.learning.reference.rules import RULES, Rule, sampled_child
from eagle_plugin.learning.reference.target import target_features, tree_logits
from eagle_plugin.models.shipped import HEAD, head_folder, question_files

NAMES = {"deterministic": "target_only", "recursive_rejection": "recursive_rejection", "sampled_child": "sampled_child"}
STEPS = {8: 2, 16: 4}  # nodes with the root -> levels
TOPK = CHILDREN = 4


class Response(NamedTuple):
    """The target's response to a prompt, with the head's states of it."""

    prompt: str
    tokens: list[int]
    roots: Tensor  # [contexts] int64, where trees are drafted
    p: Tensor  # [contexts, 1, V], the target's distribution after each root
    prefill: HeadPrefill


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help=f"a model folder, or a name of the catalogue ({TARGET})")
    parser.add_argument("--head", default=HEAD, help=f"an EAGLE-3 head's folder or name ({HEAD})")
    parser.add_argument(
        "--prompts", type=int, default=24, help="questions of examples/prompts, taken from every group in turn"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each response")
    parser.add_argument("--draws", type=int, default=3, help="trees per context of a rule that draws")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--slot-weights", type=float, nargs=2, default=SLOT_WEIGHTS, help="of core/propose.py")
    parser.add_argument("--sharpness", type=float, default=SHARPNESS, help="of core/gumbel.py")
    parser.add_argument("--tables", nargs="+", choices=("rules", "chains"), default=["rules", "chains"])
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


def generate_response(
    model: Any, ids: list[int], n: int, temperature: float, end: int, gen: torch.Generator
) -> list[int]:
    """The target's tokens after ids, at most n, the end-of-text token included."""
    tokens, cache, unread = list(ids), None, torch.tensor([ids])
    while len(tokens) < len(ids) + n and tokens[-1] != end:
        output = model(unread, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[0, -1].float(), output.past_key_values
        if temperature:
            tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=gen)))
        else:
            tokens.append(int(logits.argmax()))
        unread = torch.tensor([tokens[-1:]])
    return tokens


def generate_responses(
    model: Any,
    head: DraftHead,
    tokenizer: Any,
    prompts: list[Question],
    options: argparse.Namespace,
    temperature: float,
) -> Iterator[Response]:
    gen = torch.Generator().manual_seed(options.seed)
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = generate_response(model, ids, options.tokens, temperature, tokenizer.eos_token_id, gen)
        roots = torch.arange(len(ids), len(tokens) - 1, 2)
        if len(roots):
            p = distribution(model(torch.tensor([tokens])).logits[0, roots, None], temperature)
            prefill = prefill_head(head, tokens, target_features(model, head, tokens))
            yield Response(prompt.id, tokens, roots, p, prefill)


def score(
    model: Any, head: DraftHead, response: Response, rule: Rule, nodes: int, temperature: float, gen: torch.Generator
) -> Tensor:
    """The accept length [contexts] of one tree of that size at every context."""
    params = SamplingParams.of(len(response.roots), temperature)
    trees, proposals = draft_trees(
        head, response.tokens, response.prefill, response.roots, rule, params, gen,
        Shape(STEPS[nodes], TOPK, nodes),
    )  # fmt: skip
    p = distribution(tree_logits(model, response.tokens, response.roots, trees), temperature)
    return expected_accept_length(trees, p, proposals)


def score_node(head: DraftHead, response: Response, rule: Rule, temperature: float, gen: torch.Generator) -> Tensor:
    """The probability [contexts] that one of CHILDREN children of the root is accepted, whatever its score."""
    params = SamplingParams.of(len(response.roots), temperature)
    sampled = rule.children(TOPK) - TOPK if temperature else 0  # children that come on top of topk
    trees, proposals = draft_trees(
        head, response.tokens, response.prefill, response.roots, rule, params, gen,
        Shape(1, CHILDREN - sampled, CHILDREN + 1),
    )  # fmt: skip
    p = torch.nn.functional.pad(response.p, (0, 0, 0, CHILDREN))  # nothing is accepted after the children: leaves
    return expected_accept_length(trees, p, proposals) - 1


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
    known = {
        name: (RULES | {"sampled_child": sampled_child(options.slot_weights)})[rule] for name, rule in NAMES.items()
    }
    for temperature in options.temperatures:
        task = bar.add_task(f"temperature {temperature:g}", total=len(prompts))
        # at temperature 0 nothing is drawn, so the three rules are the same
        rules = list(NAMES) if temperature else ["deterministic"]
        lengths: dict[tuple[str, int], list[Tensor]] = {(rule, nodes): [] for nodes in STEPS for rule in rules}
        singles: dict[str, list[Tensor]] = {rule: [] for rule in rules}
        names: list[str] = []
        gen = torch.Generator().manual_seed(options.seed)
        for response in generate_responses(model, head, tokenizer, prompts, options, temperature):
            names += [response.prompt] * len(response.roots)
            for rule in rules:
                draws = range(options.draws if rule != "deterministic" else 1)
                nodes_of = [score_node(head, response, known[rule], temperature, gen) for _ in draws]
                singles[rule].append(torch.stack(nodes_of).mean(0))
                for nodes in STEPS:
                    trees_of = [score(model, head, response, known[rule], nodes, temperature, gen) for _ in draws]
                    lengths[rule, nodes].append(torch.stack(trees_of).mean(0))
            bar.advance(task)
        bar.update(task, completed=len(prompts))
        for nodes in STEPS:
            base = torch.cat(lengths["deterministic", nodes])
            for rule in NAMES:
                measured = rule if rule in rules else "deterministic"
                length = torch.cat(lengths[measured, nodes])
                rows.append(
                    {"temperature": temperature, "rule": rule, "nodes": nodes, "contexts": len(base)}
                    | {"per_node": round(float(torch.cat(singles[measured]).mean()), 4)}
                    | mean_and_error("accept_length", length, names)
                    | mean_and_error("gain", length - base, names)
                )
    return rows


def measure_chains(
    model: Any, head: DraftHead, tokenizer: Any, prompts: list[Question], options: argparse.Namespace, bar: Progress
) -> list[dict[str, Any]]:
    """All rows of the second table."""
    rows = []
    for temperature in options.temperatures:
        task = bar.add_task(f"chains, temperature {temperature:g}", total=len(prompts))
        trees = {"tree": drawn_trees(RULES["target_only"])}
        if temperature:
            trees = {
                "tree, sampled_child": drawn_trees(sampled_child(options.slot_weights)),
                "tree, gumbel": coupled_trees(options.sharpness),
            }
        found: dict[str, dict[int, list[Tensor]]] = {}
        names: list[str] = []
        gen = torch.Generator().manual_seed(options.seed)
        for response in generate_responses(model, head, tokenizer, prompts, options, temperature):
            names += [response.prompt] * len(response.roots)
            contexts = Contexts(model, head, response.tokens, response.prefill, response.roots, temperature)
            drawn: dict[str, list[Lengths]] = {}
            for _ in range(options.draws if temperature else 1):
                for name, lengths in chains(contexts, gen).items():
                    drawn.setdefault(name, []).append(lengths)
                for name, measured in trees.items():
                    drawn.setdefault(name, []).append(measured(contexts, gen))
            for name, several in drawn.items():
                for nodes in NODES:
                    mean = torch.stack([lengths[nodes].double() for lengths in several]).mean(0)
                    found.setdefault(name, {}).setdefault(nodes, []).append(mean)
            bar.advance(task)
        bar.update(task, completed=len(prompts))
        lengths_of = {name: {nodes: torch.cat(x) for nodes, x in of.items()} for name, of in found.items()}
        for name, of in lengths_of.items():
            for nodes, length in of.items():
                row = {"temperature": temperature, "rule": name, "nodes": nodes, "contexts": len(length)}
                row |= mean_and_error("accept_length", length, names)
                if name in trees:
                    best = max((of[nodes] for key, of in lengths_of.items() if key not in trees), key=Tensor.mean)
                    row |= mean_and_error("of_chain", length - best, names)
                rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table(title="accept length by rule (±: standard error over prompts)")
    for column in ("T", "nodes", "rule", "per node", "accept length", "gain"):
        out.add_column(column, justify="left" if column == "rule" else "right", no_wrap=True)
    for row in rows:
        out.add_row(
            f"{row['temperature']:g}",
            str(row["nodes"]),
            row["rule"],
            f"{row['per_node']:.3f}",
            f"{row['accept_length']:.3f} ±{row['accept_length_error']:.3f}",
            "" if row["rule"] == "deterministic" else f"{row['gain']:+.3f} ±{row['gain_error']:.3f}",
            end_section=row["rule"] == list(NAMES)[-1],
        )
    return out


@torch.no_grad()
def main() -> None:
    options, console = parse(), Console()
    folder = resolve_target(options.target, console)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    head = load_head(model, folder, head_folder(options.head), algorithm="EAGLE3")
    questions = read_questions(question_files())
    prompts = list(chain.from_iterable(assign_rounds(questions)))[: options.prompts]
    tables = {"rules": (measure, table), "chains": (measure_chains, chains_table)}
    with Progress(console=console) as bar:
        given = model, head, AutoTokenizer.from_pretrained(folder), prompts, options, bar
        found = {name: tables[name][0](*given) for name in options.tables}
    for name, rows in found.items():
        console.print(tables[name][1](rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()
