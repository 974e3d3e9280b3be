"""The check before serving: does a head load, does it fit its target, and are its drafts what they should be?

A head with tensors of the right shape can still be wrong in ways that no engine reports: it was trained for another
target, or its aux layers are written in the other engine's convention. In both cases the drafts are not accepted, so
the head drafts a few responses of the target here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.data.rows import TokenRow
from eagle_plugin.data.store.features import load_target
from eagle_plugin.data.target_files import load_tokenizer
from eagle_plugin.evaluate.chains import forced_likelihoods
from eagle_plugin.evaluate.measure import CHAIN, Responses, evaluate
from eagle_plugin.evaluate.responses import chat_ids, responses_at
from eagle_plugin.evaluate.stats import AcceptStats, paired_difference, summarize
from eagle_plugin.heads.checkpoint import HeadInfo, check_head
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.interpretations import Interpretation, read_interpretations
from eagle_plugin.heads.kinds import HEADS, stored_algorithm
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import read_manifest
from eagle_plugin.reference.draft import prefill_head

# Chat, knowledge, reasoning, maths and code, so that a head trained on any of them accepts something.
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain in simple words how a vaccine works.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Show your work.",
    "List five tips for staying healthy while working at a desk.",
    "Summarize the causes of the First World War in one paragraph.",
    "Translate into French: Where is the nearest railway station?",
    "Write a polite email that asks a colleague to move a meeting to Friday.",
    "Sam has 12 apples, gives away a third of them and buys 5 more. How many has he now?",
    "What is the difference between a list and a tuple in Python?",
    "Describe the water cycle to a ten-year-old child.",
)
TOKENS = 96  # of each answer
# Least acceptance of the first draft. A head that always drafts the most frequent tokens reaches a few per cent; below
# this value drafting costs more time than it saves.
MIN_ACCEPTANCE = 0.1
# The same as a share of the acceptance in training: other prompts give another acceptance, but not half of it.
MIN_SHARE_OF_TRAINING = 0.5


class Measurement(NamedTuple):
    """One interpretation of the head, and the acceptance of its drafts on the target's responses."""

    interpretation: Interpretation
    stats: AcceptStats  # of chains of 4 drafts after every token
    likelihood: Tensor  # [responses] float64: mean log q of the next 4 tokens


class Report(NamedTuple):
    """A head that may be served."""

    info: HeadInfo
    served: Measurement  # as the engine reads the head
    others: list[Measurement]  # other interpretations of an ambiguous checkpoint, all worse
    trained: float | None  # acceptance of the first draft that training measured on its held-out rows
    warnings: list[str]


def check(
    target_dir: str | Path,
    head_dir: str | Path,
    *,
    prompts: Sequence[str] = PROMPTS,
    algorithm: str | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> Report:
    """Check a head's files and measure its drafts on the target's greedy answers to some prompts.

    algorithm: SGLang's --speculative-algorithm (None: the head's own). report gets the number of responses written.

    Raises:
        HeadError: the files do not fit (`heads.checkpoint.check_head`), the drafts are hardly ever right, far worse
            than in training, or better with another interpretation of the aux layers than the engine's.
    """
    config = read_config(head_dir)
    info = check_head(target_dir, head_dir, algorithm=algorithm or stored_algorithm(config))
    served = Interpretation(info.aux_layer_ids, bool(config.get("norm_output")), "as the engine reads it")
    found = read_interpretations(head_dir, target_dir) if HEADS[info.kind].format.reads_aux_layers else []
    interpretations = [served, *(other for other in found if other[:2] != served[:2])]

    model, tokenizer = load_target(target_dir), load_tokenizer(target_dir)
    rows = [TokenRow(f"check-{i}", "check", chat_ids(tokenizer, p), [], "", "val") for i, p in enumerate(prompts)]
    responses = responses_at(lambda: model, target_dir, rows, temperature=0.0, tokens=TOKENS, report=report)
    measured = [_measure(model, responses, target_dir, head_dir, one) for one in interpretations]
    warnings = [*info.warnings, *_compare_interpretations(measured, target_dir, head_dir)]
    manifest = read_manifest(head_dir) or {}
    trained = next(iter(manifest.get("acceptance") or []), None)
    _check_acceptance(measured[0].stats, trained, target_dir, head_dir)
    return Report(info, measured[0], measured[1:], trained, warnings)


@torch.no_grad()
def _measure(
    model: Any, rows: Sequence[TokenRow], target_dir: str | Path, head_dir: str | Path, interpretation: Interpretation
) -> Measurement:
    head = load_any_head(head_dir, target_dir, torch.bfloat16, interpretation)
    responses = Responses(model, rows, head.aux_layers, 0.0)
    stats = summarize(evaluate(head, responses)["chain4_everywhere"])
    if stats is None:
        raise HeadError(f"{target_dir} answers {len(rows)} prompts with almost no tokens; test the target alone first")
    likelihoods = []
    for response in responses.items:
        first, last = len(response.row.prompt_ids), len(response.tokens) - CHAIN.steps
        if first < last:
            roots = torch.arange(first, last)
            prefill = prefill_head(head, response.tokens, responses.features(response, head))
            logq = forced_likelihoods(head, response.tokens, prefill, roots, CHAIN.steps)
            likelihoods.append(logq.double().nanmean())
    return Measurement(interpretation, stats, torch.stack(likelihoods))


def _compare_interpretations(
    measured: list[Measurement], target_dir: str | Path, head_dir: str | Path
) -> Iterator[str]:
    """Refuse a head that is better in another interpretation than the engine's; warn where no difference is seen.

    They are compared by likelihood, which needs fewer tokens for a decision than acceptance does.
    """
    served = measured[0]
    for other in measured[1:]:
        _, low, high = paired_difference(other.likelihood, served.likelihood)
        if low > 0 and other.stats.cumulative[0] >= MIN_ACCEPTANCE:
            layers = ",".join(map(str, other.interpretation.aux_layers))
            norm = "yes" if other.interpretation.norm_output else "no"
            raise HeadError(
                f"{head_dir} was trained on {_describe(other)}, but the engine would give it {_describe(served)}; "
                f"write it again: eagle-plugin export {head_dir} NEW --target {target_dir} "
                f"--aux-layers {layers} --norm-output {norm}"
            )
        if high >= 0:
            yield (
                f"{head_dir} can mean {_describe(served)} or {_describe(other)}, and {len(served.likelihood)} "
                "responses do not decide which; ask who trained it, or check it with more prompts"
            )


def _describe(measurement: Measurement) -> str:
    """For example: the inputs of layers 2, 15, 27 (vLLM's ids; accept length 1.48, log q -3.66)."""
    meaning, logq = measurement.interpretation, float(measurement.likelihood.mean())
    layers = ", ".join(map(str, meaning.aux_layers))
    state = " with the normed state" if meaning.norm_output else ""
    length = measurement.stats.accept_length
    return f"the inputs of layers {layers}{state} ({meaning.origin}; accept length {length:.2f}, log q {logq:.2f})"


def _check_acceptance(stats: AcceptStats, trained: float | None, target_dir: str | Path, head_dir: str | Path) -> None:
    found = stats.cumulative[0]
    if found < MIN_ACCEPTANCE:
        raise HeadError(
            f"the first draft of {head_dir} is right for {found:.1%} of the tokens that {target_dir} writes, wanted "
            f"{MIN_ACCEPTANCE:.0%} or more; it was trained for another target or hardly at all; "
            "use the head of this target"
        )
    if trained is not None and found < MIN_SHARE_OF_TRAINING * trained:
        raise HeadError(
            f"the first draft of {head_dir} is right for {found:.1%} of the tokens that {target_dir} writes, but was "
            f"for {trained:.1%} in training; give the target (weights and chat template) that it was trained for"
        )
