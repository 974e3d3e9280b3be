"""Responses that a target wrote itself, on which heads are evaluated; written once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.cache_folder import cache_folder
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row, read_rows
from eagle_plugin.learning.data.sources.sets import eval_prompts
from eagle_plugin.learning.data.target_files import stop_token_ids
from eagle_plugin.learning.data.target_identity import target_digests

POOLED = "all"  # the source of all prompts together
BATCH = 40  # sequences that the target writes together
VERSION = 2  # of how the target writes: responses in the cache of another version are not used


def set_rows(names: Sequence[str], limit: int, tokenizer: Any) -> list[TokenRow]:
    """The first `limit` prompts of each evaluation set as rows without a response; the set is their source."""
    return [
        TokenRow(f"{name}-{i}", name, chat_ids(tokenizer, prompt), [], "", "val")
        for name in names
        for i, prompt in enumerate(eval_prompts(name, limit))
    ]


def chat_ids(tokenizer: Any, prompt: str, before: Sequence[dict[str, Any]] = ()) -> list[int]:
    """The token ids of a user message, after the turns `before` it, as a server would render them; those of the message
    as plain text where there is no chat template."""
    if not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    chat = [*before, {"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def held_out_rows(path: str | Path, limit: int) -> list[TokenRow]:
    """The first `limit` rows of each source in a file of token rows: those of split val where there are any.

    Raises:
        DataError: the file has no rows.
    """
    rows = list(read_rows(path))
    rows = [row for row in rows if row.split == "val"] or rows
    if not rows:
        raise DataError(f"{path} holds no rows; give a file that `eagle-plugin data generate` wrote")
    taken: dict[str, list[TokenRow]] = {}
    for row in rows:
        of = taken.setdefault(row.source, [])
        if len(of) < limit:
            of.append(row)
    return [row for of in taken.values() for row in of]


def responses_at(
    model: Callable[[], Any],
    target_dir: str | Path,
    rows: Sequence[TokenRow],
    *,
    dtype: torch.dtype,
    temperature: float,
    tokens: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> list[TokenRow]:
    """Return the rows with a response that the target wrote at this temperature, at most `tokens` long.

    A row keeps its response if it was written at this temperature. The rest are written together, and kept in the cache
    under a digest of the target, the prompts and the settings. model gives the target in `dtype` and is called only if
    something has to be written; report gets the number of prompts done.
    """
    ready = {i: replace(row, response_ids=row.response_ids[:tokens]) for i, row in enumerate(rows)
             if row.response_ids and row.temperature == temperature}  # fmt: skip
    missing = [i for i in range(len(rows)) if i not in ready]
    if missing:
        prompts = [rows[i] for i in missing]
        path = _cache_file(target_dir, prompts, dtype, temperature, tokens, seed)
        if not path.is_file():
            written = generate_responses(
                model(), prompts, temperature, tokens, seed, stop_token_ids(target_dir), report
            )
            write_output(path, map(format_row, written), "name another folder in EAGLE_CACHE_DIR")
        for i, row in zip(missing, read_rows(path), strict=True):  # the file may be of rows with other names
            ready[i] = replace(rows[i], response_ids=row.response_ids, finish=row.finish, temperature=row.temperature)
    report(len(rows))
    return [ready[i] for i in range(len(rows))]


@torch.no_grad()
def generate_responses(
    model: Any,
    prompts: Sequence[TokenRow],
    temperature: float,
    tokens: int,
    seed: int,
    ends: Sequence[int],
    report: Callable[[int], None] = lambda done: None,
) -> list[TokenRow]:
    """Let the target answer every prompt with at most `tokens` tokens, the stop token (one of `ends`) included."""
    from transformers import GenerationConfig

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(max_new_tokens=tokens, eos_token_id=list(ends), pad_token_id=0, **sampling)
    # `generate` takes what is not set here, such as a repetition penalty, from the target's generation_config.json.
    model.generation_config = GenerationConfig()
    written: dict[int, TokenRow] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].prompt_ids))  # little padding within a batch
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            longest = max(len(prompts[i].prompt_ids) for i in batch)
            ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.int64, device=model.device)
            for row, i in enumerate(batch):
                ids[row, longest - len(prompts[i].prompt_ids) :] = torch.tensor(prompts[i].prompt_ids)
                mask[row, longest - len(prompts[i].prompt_ids) :] = 1
            output = model.generate(ids, attention_mask=mask, generation_config=settings)
            for i, response in zip(batch, output[:, longest:].tolist(), strict=True):
                end = next((n for n, token in enumerate(response, 1) if token in ends), None)
                finish = "stop" if end else "length"
                written[i] = replace(prompts[i], response_ids=response[:end], finish=finish, temperature=temperature)
            report(len(written))
    return [written[i] for i in range(len(prompts))]


def _cache_file(
    target_dir: str | Path, prompts: Iterable[TokenRow], dtype: torch.dtype, temperature: float, tokens: int, seed: int
) -> Path:
    prompt_ids = [row.prompt_ids for row in prompts]
    facts = [VERSION, target_digests(target_dir), prompt_ids, str(dtype), temperature, tokens, seed, BATCH]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return cache_folder() / "texts" / f"{digest[:32]}.jsonl"
