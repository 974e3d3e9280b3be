"""Records a trace for the simulator: the shipped head on greedy responses of its target, with the reference decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.simulate_traces import CAPS, MISSED, Trace
from eagle_plugin.bench.choices import TARGET, resolve_target
from eagle_plugin.bench.questions import assign_rounds, read_questions
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.data.rows import TokenRow
from eagle_plugin.learning.evaluate.responses import chat_ids, generate_responses
from eagle_plugin.learning.reference.draft import draft_candidates, prefill_head
from eagle_plugin.learning.reference.target import target_features
from eagle_plugin.models.shipped import HEAD, head_folder, question_files


@torch.no_grad()
def record(prompts: int, tokens: int, console: Console) -> Trace:
    """A trace of `prompts` questions of examples/prompts, at each of `tokens` generated tokens but the last ones."""
    folder = resolve_target(TARGET, console)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    head = load_any_head(head_folder(HEAD), folder, model.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = list(chain.from_iterable(assign_rounds(read_questions(question_files()))))[:prompts]
    rows = [TokenRow(one.id, one.group, chat_ids(tokenizer, one.prompt), [], "", "val") for one in questions]
    parts, starts = [], [0]
    for row in generate_responses(model, rows, 0.0, tokens, 0, [tokenizer.eos_token_id]):
        if len(row.response_ids) > CAPS.steps:
            parts.append(record_text(model, head, row.prompt_ids + row.response_ids, len(row.prompt_ids)))
            starts.append(starts[-1] + len(parts[-1][0]))
    scores, paths = (torch.cat(values) for values in zip(*parts, strict=True))
    return Trace(scores.float().numpy(), paths.numpy().astype(np.uint8), np.array(starts[:-1], dtype=np.int32))


def record_text(model: Any, head: Any, tokens: Sequence[int], prompt: int) -> tuple[Tensor, Tensor]:
    """The scores [T, C] and paths [T, D] of a greedy text of the target whose first `prompt` tokens were given."""
    text = list(tokens)
    roots = torch.arange(prompt, len(text) - CAPS.steps)
    prefill = prefill_head(head, text, target_features(model, head, text))
    params = SamplingParams.greedy(len(roots))
    table = draft_candidates(head, text, prefill, roots, params, torch.zeros_like(roots), CAPS)
    path = torch.full((len(roots), CAPS.steps), MISSED)
    parent = torch.full((len(roots), 1), -1)
    following = torch.tensor(text)
    for depth in range(1, CAPS.steps + 1):
        right = (table.parents == parent) & (table.tokens == following[roots + depth][:, None])
        parent = torch.where(right.any(-1), right.long().argmax(-1), -2)[:, None]  # -2: no candidate's parent
        path[:, depth - 1] = torch.where(parent[:, 0] >= 0, parent[:, 0], MISSED)
    return table.scores, path
