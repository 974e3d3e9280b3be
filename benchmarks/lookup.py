"""Tokens per round of trees with and without looked-up branches, on real text, without an engine.

    python benchmarks/lookup.py [--json out/lookup.json]

The target (SmolLM2-135M-Instruct) answers at temperature 0, and rounds run along its answers: each drafts a tree
by the head of examples/heads, with the branches that `eagle_plugin.core.lookup` finds in the prompt and the answer so
far, follows it as far as it is the answer, and begins the next one there. A plain round of the same answer has accept
length 1. There is no time in it: what a round costs does not depend on where its nodes are from.

ordinary: questions of examples/prompts. repeating: sequences and code to be repeated, wholly or with one change.

ratios: for every kind of step ("cell" of `core.lookup`) how many were looked up, and the misses over the misses that
the head alone expected: what `PRIOR` of eagle_plugin/runtime/lookups.py says of a request of which nothing is known.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import textwrap
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.acceptance import generate_response
from eagle_plugin.bench.choices import TARGET, resolve_target
from eagle_plugin.bench.questions import assign_rounds, read_questions
from eagle_plugin.core.lookup import CELLS, LENGTHS
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.kernels.lookup import look_up
from eagle_plugin.kernels.tree import select_tree
from eagle_plugin.learning.reference.draft import draft_candidates, prefill_head
from eagle_plugin.learning.reference.target import target_features
from eagle_plugin.models.shipped import HEAD, head_folder, question_files
from eagle_plugin.policy.report import shape_of
from eagle_plugin.runtime.lookups import Lookups

SHAPES = ("3/1/4", "3/4/16", "5/4/16", "8/4/32")
# Functions of the standard library: text that the target has not been trained to complete in this place alone.
CODE = (textwrap.dedent, textwrap.indent, textwrap.shorten, textwrap.fill, inspect.cleandoc, inspect.indentsize)
TASKS = (
    "Repeat the following text word for word:\n\n{text}",
    "Here is a Python function:\n\n```python\n{text}```\n\nWrite the whole function again, with the first parameter "
    "renamed to value.",
    "Copy this code exactly:\n\n```python\n{text}```",
)


class Answer(NamedTuple):
    """A prompt and the target's answer."""

    kind: str
    tokens: list[int]
    begin: int  # of the answer in the tokens


class Yield(NamedTuple):
    """What the rounds of one answer yielded."""

    rounds: int
    tokens: int
    proposed: int
    accepted: int
    sums: Tensor  # [3, CELLS]: steps, misses that the head expected, misses


def prompts_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Kind and text of each."""
    questions = chain.from_iterable(assign_rounds(read_questions(question_files())))
    ordinary = [("ordinary", question.prompt) for question in questions][: options.prompts]
    sequences = [textwrap.dedent(inspect.getsource(function)) for function in CODE]
    repeating = [("repeating", task.format(text=text[:700])) for text in sequences for task in TASKS]
    return [*ordinary, *repeating[: options.prompts]]


def candidates_of(answer: Answer, head: DraftHead, features: Tensor, shape: Shape) -> CandidateTable:
    """What the head drafts after each token of an answer."""
    roots = torch.arange(answer.begin, len(answer.tokens) - 1)
    prefill, params = prefill_head(head, answer.tokens, features), SamplingParams.greedy(len(roots))
    return draft_candidates(head, answer.tokens, prefill, roots, params, torch.zeros_like(roots), shape)


def run_rounds(answer: Answer, tables: CandidateTable, shape: Shape, with_lookup: bool, vocabulary: int) -> Yield:
    """Rounds along an answer, from its first token on, which the prefill gives; tables of `candidates_of`."""
    tokens, first = answer.tokens, answer.begin
    lookups = Lookups(2, shape, len(tokens) + shape.reach, vocabulary, "cpu")
    row = torch.ones(1, dtype=torch.int64)
    lookups.begin(row, [tokens[:first]])
    place, rounds, sums = first, 0, torch.zeros(3, CELLS)
    while place < len(tokens) - 1:
        root, length = torch.tensor(tokens[place : place + 1]), torch.tensor([place])
        more = shape.steps if with_lookup else 0
        table = CandidateTable(
            *(torch.cat([x[place - first][None], x.new_zeros(1, more)], dim=1).contiguous() for x in tables)
        )
        if with_lookup:
            look_up(lookups.history, table, shape.candidates, shape.width, row, length, root)
        accepted = walk(select_tree(table, root, shape.width), tokens[place + 1 :])
        if with_lookup:
            sums += steps_of(lookups, accepted)
            lookups.append(row, length, accepted)
        place += int(accepted.lengths)
        rounds += 1
    proposed, right = lookups.history.counts[1].tolist()
    return Yield(rounds, place - first, proposed, right, sums)


def walk(tree: DraftTree, text: list[int]) -> Accepted:
    """Follow a tree as far as it says what the text says; the text's next token comes after it."""
    node, length = 0, 0
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    while length < len(text) - 1:
        children = [i for i, parent in enumerate(parents) if i and parent == node and tokens[i] == text[length]]
        if not children:
            break
        node, length = children[0], length + 1
    path = torch.tensor([text[: length + 1]])
    return Accepted(torch.zeros_like(path).int(), torch.tensor([length + 1], dtype=torch.int32), path)


def steps_of(lookups: Lookups, accepted: Accepted) -> Tensor:
    """What the steps of this round's path add to the sums of their cells, as `append_tokens` counts them."""
    history, sums = lookups.history, torch.zeros(3, CELLS)
    if history.starts[1] < 0:
        return sums
    for i, cell in enumerate(history.cells[1].tolist()):
        if cell < 0 or i >= int(accepted.lengths):
            break
        is_right = int(history.path[1, i]) == int(accepted.tokens[0, i])
        sums[:, cell] += torch.tensor([1, float(history.doubts[1, i]), not is_right])
        if not is_right:
            break
    return sums


@torch.no_grad()
def main() -> None:
    """Print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help=f"a model folder, or a name of the catalogue ({TARGET})")
    parser.add_argument("--head", default=HEAD, help=f"an EAGLE-3 head's folder or name ({HEAD})")
    parser.add_argument("--prompts", type=int, default=18, help="of each kind, at most")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer, at most")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[*map(shape_of, SHAPES)], help="steps/topk/width")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options, console = parser.parse_args(), Console()
    folder = resolve_target(options.target, console)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    head = load_any_head(head_folder(options.head), folder, model.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[dict[str, Any]] = []
    found_by: dict[tuple[str, Shape, bool], list[Yield]] = {}
    for kind, text in prompts_of(options):
        chat = [{"role": "user", "content": text}]
        ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = generate_response(model, ids, options.tokens, 0.0, tokenizer.eos_token_id, torch.Generator())
        if len(tokens) < len(ids) + 3:
            continue
        features = target_features(model, head, tokens)
        answer, vocabulary = Answer(kind, tokens, len(ids)), model.config.vocab_size
        for shape in options.shapes:
            tables = candidates_of(answer, head, features, shape)
            for with_lookup in (False, True):
                found = run_rounds(answer, tables, shape, with_lookup, vocabulary)
                found_by.setdefault((kind, shape, with_lookup), []).append(found)
        console.print(f"{kind}: {len(tokens) - len(ids)} tokens")
    for (kind, shape, with_lookup), yields in found_by.items():
        total = [sum(values) for values in zip(*(one[:4] for one in yields), strict=True)]
        sums = torch.stack([one.sums for one in yields]).sum(dim=0)
        ratios = (sums[2] / sums[1].clamp(min=1e-9)).view(-1, len(LENGTHS)) if with_lookup else None
        row = {"kind": kind, "shape": str(shape), "lookup": with_lookup, "answers": len(yields), "rounds": total[0]}
        row |= {"accept_length": round(total[1] / total[0], 4), "looked_up": total[2], "looked_up_accepted": total[3]}
        if ratios is not None:
            row |= {"steps": sums[0].view(-1, len(LENGTHS)).int().tolist(), "ratios": ratios.round(decimals=3).tolist()}
        rows.append(row)
        console.print(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
