"""Accept length by the length of the context and by the window of the head: does a head still draft well at 8k tokens?

    python benchmarks/long_contexts.py [--lengths 256 1024 4096 7900] [--windows 1024 512 256] [--json out/windows.json]

The target (SmolLM2-135M-Instruct, float32) answers a question about the first tokens of modules of Python's standard
library, greedily. After every other token of an answer a tree is drafted, and as many of its tokens are accepted as the
answer goes on with: the accept length of a server, the bonus token included, without an engine. All windows are
compared at the same contexts; "all" is the head as it is. A window is what `eagle-plugin export --window` writes, or
SGLang's --speculative-draft-window-size plus one.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from eagle_plugin.bench.choices import TARGET, resolve_target
from eagle_plugin.common.atomic_io import replace_file
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree, select_tree
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.reference.draft import draft_candidates, prefill_head
from eagle_plugin.models.shipped import HEAD, head_folder

MODULES = ("argparse", "typing", "subprocess", "tarfile", "doctest", "inspect")
QUESTION = "Explain what this module does, and write a short example of how to use it."
TEMPLATE = 60  # tokens for the question and the chat's marks, with some to spare
TREE = Shape(6, 4, 16)
AT_ONCE = 8  # trees of one context that are drafted together


class Answer(NamedTuple):
    """A greedy answer and what the head reads of it."""

    tokens: list[int]
    features: Tensor  # [tokens - 1, F]
    first: int  # of the answer's tokens


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help=f"a model folder, or a name of the catalogue ({TARGET})")
    parser.add_argument("--head", default=HEAD, help=f"an EAGLE-3 or P-EAGLE head's folder or name ({HEAD})")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 7900], metavar="N")
    parser.add_argument("--windows", type=int, nargs="+", default=[1024, 512, 256, 128], metavar="W")
    parser.add_argument("--modules", type=int, choices=range(1, len(MODULES) + 1), default=4, help="of each length")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def prompts(tokenizer: Any, length: int, modules: int) -> Iterator[tuple[str, list[int]]]:
    """Modules that are long enough, cut so that a prompt has about `length` tokens."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES[:modules]:
        body = tokenizer((library / f"{module}.py").read_text(encoding="utf-8"))["input_ids"]
        if len(body) >= length:
            text = f"```python\n{tokenizer.decode(body[: length - TEMPLATE])}\n```\n\n{QUESTION}"
            chat = [{"role": "user", "content": text}]
            yield module, tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def answer(model: Any, head: DraftHead, ids: list[int], count: int, end: int) -> Answer:
    """At most `count` tokens; the target reads each token once."""
    tokens, cache, unread, parts = list(ids), None, torch.tensor([ids]), []
    while len(tokens) < len(ids) + count and tokens[-1] != end:
        output = model(unread, past_key_values=cache, use_cache=True, logits_to_keep=1, output_hidden_states=True)
        cache = output.past_key_values
        parts.append(torch.cat([output.hidden_states[i][0] for i in head.aux_layers or (-1,)], -1))
        tokens.append(int(output.logits[0, -1].argmax()))
        unread = torch.tensor([tokens[-1:]])
    return Answer(tokens, torch.cat(parts), len(ids))


def accepted(tree: DraftTree, following: list[int]) -> int:
    """The accept length of the one tree of a batch where the target goes on with these tokens."""
    tokens, parents, node = tree.tokens[0].tolist(), tree.parents[0].tolist(), 0
    for count, token in enumerate(following):
        children = [i for i, parent in enumerate(parents) if parent == node and i > node and tokens[i] == token]
        if not children:
            return count + 1
        node = children[0]
    return len(following) + 1


def accept_lengths(head: DraftHead, text: Answer) -> list[int]:
    """After every other token of the answer that has more after it than a tree is deep."""
    tokens, deepest = text.tokens, TREE.max_accept_length
    prefill, found = prefill_head(head, tokens, text.features), []
    for roots in torch.arange(text.first, len(tokens) - deepest, 2).split(AT_ONCE):
        params, keys = SamplingParams.greedy(len(roots)), torch.zeros_like(roots)
        table = draft_candidates(head, tokens, prefill, roots, params, keys, TREE)
        trees = select_tree(table, torch.tensor(tokens)[roots], TREE.width)
        for i, root in enumerate(roots.tolist()):
            found.append(accepted(trees.take(torch.tensor([i])), tokens[root + 1 : root + deepest]))
    return found


def measure(model: Any, head: DraftHead, tokenizer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each length and window."""
    for length in options.lengths:
        answers = [
            answer(model, head, ids, options.tokens, tokenizer.eos_token_id)
            for _, ids in prompts(tokenizer, length, options.modules)
        ]
        for window in (None, *options.windows):
            head.window = window
            found = [n for text in answers for n in accept_lengths(head, text)]
            if found:
                mean = sum(found) / len(found)
                yield {"length": length, "window": window, "contexts": len(found), "accept_length": round(mean, 3)}


@torch.no_grad()
def main() -> None:
    options, console = parse(), Console()
    folder = resolve_target(options.target, console)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = load_any_head(head_folder(options.head), folder, model.dtype)
    windows = (None, *options.windows)
    rows = []
    with Progress(console=console) as bar:
        task = bar.add_task("lengths and windows", total=len(options.lengths) * len(windows))
        for row in measure(model, head, AutoTokenizer.from_pretrained(folder), options):
            rows.append(row)
            bar.advance(task)
            if options.json:  # whole after every row: a run that ends early leaves what it found
                with replace_file(options.json) as temporary:
                    temporary.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table = Table("tokens", *("all" if window is None else str(window) for window in windows), title="accept length")
    for length in options.lengths:
        of = {row["window"]: row["accept_length"] for row in rows if row["length"] == length}
        table.add_row(str(length), *(f"{of[window]:.3f}" if window in of else "" for window in windows))
    console.print(table)


if __name__ == "__main__":
    main()
