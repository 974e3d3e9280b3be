"""The check before serving: does a head load, does it fit its target, and are its drafts what they should be?

A head with tensors of the right shape can still be wrong in ways that no engine reports: it was trained for another
target, or its config.json names aux layers that it was not trained on. In both cases few drafts are accepted, so the
head drafts a few responses of the target here, from other layers too where these are not on record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.common.devices import fast_dtype
from eagle_plugin.heads.checkpoint import HeadInfo, check_head
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.interpretations import Interpretation, likely_mistakes, read_interpretations
from eagle_plugin.heads.kinds import HEADS, stored_algorithm
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import read_manifest
from eagle_plugin.heads.vllm_classes import class_config
from eagle_plugin.learning.data.rows import TokenRow
from eagle_plugin.learning.data.store.features import load_target
from eagle_plugin.learning.data.target_files import load_tokenizer
from eagle_plugin.learning.evaluate.chains import forced_likelihoods
from eagle_plugin.learning.evaluate.measure import CHAIN, Responses, evaluate
from eagle_plugin.learning.evaluate.responses import chat_ids, responses_at
from eagle_plugin.learning.evaluate.stats import AcceptStats, paired_difference, summarize
from eagle_plugin.learning.reference.draft import prefill_head

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
    info: HeadInfo | None = None,
    device: str = "cpu",
    report: Callable[[int], None] = lambda done: None,
) -> Report:
    """Check a head's files and measure its drafts on the target's greedy answers to some prompts.

    info: what an engine makes of the files (None: they are checked by SGLang's rules). device: of target and head.
    report gets the number of responses written.

    Raises:
        HeadError: the files do not fit (`heads.checkpoint.check_head`), the drafts are hardly ever right, far worse
            than in training, or better with other aux layers than those that the engine captures.
    """
    if info is None:
        info = check_head(target_dir, head_dir, algorithm=stored_algorithm(read_config(head_dir)))
    served = _as_served(head_dir, info)
    found = read_interpretations(head_dir, target_dir) if HEADS[info.kind].format.reads_aux_layers else []
    possible = [other for other in found if other[:2] != served[:2]]
    known = [served[:2], *(other[:2] for other in possible)]
    mistakes = [other for other in likely_mistakes(served, head_dir, target_dir) if other[:2] not in known]

    layers = {layer for one in (served, *possible, *mistakes) for layer in one.aux_layers}
    read = _answers(target_dir, prompts, layers, device, report)
    measured = [_measure(read, target_dir, head_dir, one) for one in (served, *possible)]
    # Most are no better by likelihood, which is a fraction of the work of a whole measurement.
    better = [
        one
        for one in mistakes
        if _is_better(_likelihood(_load(head_dir, target_dir, one, device), read), measured[0].likelihood)
    ]
    _refuse_better([*measured, *(_measure(read, target_dir, head_dir, one) for one in better)], target_dir, head_dir)
    warnings = [*info.warnings, *_name_ambiguous(measured, head_dir)]
    trained = _check_acceptance(measured[0].stats, target_dir, head_dir)
    return Report(info, measured[0], measured[1:], trained, warnings)


def check_block_drafter(
    target_dir: str | Path,
    head_dir: str | Path,
    device: str = "cpu",
    report: Callable[[int], None] = lambda done: None,
) -> tuple[AcceptStats, float | None]:
    """Measure a block drafter's drafts as `check` does; returns also the acceptance of the first draft in training.

    Raises:
        HeadError: only an engine computes it, or the drafts are hardly ever right or far worse than in training.
    """
    head = load_any_head(head_dir, target_dir, _dtype(device)).to(device)
    stats = _stats(head, _answers(target_dir, PROMPTS, head.aux_layers, device, report), target_dir)
    return stats, _check_acceptance(stats, target_dir, head_dir)


def _answers(
    target_dir: str | Path, prompts: Sequence[str], layers: Iterable[int], device: str, report: Callable[[int], None]
) -> Responses:
    """The target's greedy answers to some prompts with the inputs of these layers."""
    model, tokenizer = load_target(target_dir, _dtype(device), device), load_tokenizer(target_dir)
    rows = [TokenRow(f"check-{i}", "check", chat_ids(tokenizer, p), [], "", "val") for i, p in enumerate(prompts)]
    responses = responses_at(
        lambda: model, target_dir, rows, dtype=model.dtype, temperature=0.0, tokens=TOKENS, report=report
    )
    with torch.no_grad():
        return Responses(model, responses, sorted(set(layers)), 0.0)


def why_not_measured(target_dir: str | Path, head_dir: str | Path, info: HeadInfo) -> str | None:
    """Why the drafts of a head that an engine serves cannot be computed without it; None where they can."""
    try:
        _load(head_dir, target_dir, _as_served(head_dir, info), "cpu")
    except HeadError as error:
        return str(error)
    return None


def _as_served(head_dir: str | Path, info: HeadInfo) -> Interpretation:
    norm = bool(class_config(read_head(head_dir)).get("norm_output"))  # SGLang reads the same key
    return Interpretation(info.aux_layer_ids, norm, "as the engine reads it")


@torch.no_grad()
def _measure(
    responses: Responses, target_dir: str | Path, head_dir: str | Path, interpretation: Interpretation
) -> Measurement:
    head = _load(head_dir, target_dir, interpretation, str(responses.model.device))
    return Measurement(interpretation, _stats(head, responses, target_dir), _likelihood(head, responses))


def _stats(head: DraftHead, responses: Responses, target_dir: str | Path) -> AcceptStats:
    stats = summarize(evaluate(head, responses)["chain4_everywhere"])
    if stats is None:
        raise HeadError(
            f"{target_dir} answers {len(responses.items)} prompts with almost no tokens; test the target alone first"
        )
    return stats


def _load(head_dir: str | Path, target_dir: str | Path, interpretation: Interpretation, device: str) -> DraftHead:
    return load_any_head(head_dir, target_dir, _dtype(device), interpretation).to(device)


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if fast_dtype(device) == "float32" else torch.bfloat16


@torch.no_grad()
def _likelihood(head: DraftHead, responses: Responses) -> Tensor:
    """As `Measurement.likelihood`."""
    likelihoods = []
    for response in responses.items:
        first, last = len(response.row.prompt_ids), len(response.tokens) - CHAIN.steps
        if first < last:
            roots = torch.arange(first, last, device=head.embedding.device)
            prefill = prefill_head(head, response.tokens, responses.features(response, head))
            logq = forced_likelihoods(head, response.tokens, prefill, roots, CHAIN.steps)
            likelihoods.append(logq.double().nanmean().cpu())
    return torch.stack(likelihoods)


def _is_better(likelihood: Tensor, than: Tensor) -> bool:
    """Whether the difference of likelihoods per response is above zero with all of its interval."""
    return paired_difference(likelihood, than)[1] > 0


def _refuse_better(measured: list[Measurement], target_dir: str | Path, head_dir: str | Path) -> None:
    """Refuse a head that is better in another interpretation than the engine's, and name the best one.

    They are compared by likelihood, which needs fewer tokens for a decision than acceptance does.
    """
    served = measured[0]
    better = [
        other
        for other in measured[1:]
        if _is_better(other.likelihood, served.likelihood) and other.stats.cumulative[0] >= MIN_ACCEPTANCE
    ]
    if better:
        best = max(better, key=lambda other: float(other.likelihood.mean()))
        layers = ",".join(map(str, best.interpretation.aux_layers))
        norm = "yes" if best.interpretation.norm_output else "no"
        raise HeadError(
            f"{head_dir} was trained on {_describe(best)}, but the engine would give it {_describe(served)}; "
            f"write it again: eagle-plugin export {head_dir} NEW --target {target_dir} "
            f"--aux-layers {layers} --norm-output {norm}"
        )


def _name_ambiguous(measured: list[Measurement], head_dir: str | Path) -> Iterator[str]:
    """Warn of meanings of config.json between which no difference is seen."""
    served = measured[0]
    for other in measured[1:]:
        if paired_difference(other.likelihood, served.likelihood)[2] >= 0:
            yield (
                f"{head_dir} can mean {_describe(served)} or {_describe(other)}, and {len(served.likelihood)} "
                "responses do not decide which; ask who trained it, or check it with more prompts"
            )


def _describe(measurement: Measurement) -> str:
    """For example: the inputs of layers 2, 15, 27 (vLLM's ids; first draft right for 38.1%, accept length 1.48)."""
    meaning, stats = measurement.interpretation, measurement.stats
    layers = ", ".join(map(str, meaning.aux_layers))
    state = " with the normed state" if meaning.norm_output else ""
    right, length = stats.cumulative[0], stats.accept_length
    found = f"first draft right for {right:.1%}, accept length {length:.2f}"
    return f"the inputs of layers {layers}{state} ({meaning.origin}; {found})"


def _check_acceptance(stats: AcceptStats, target_dir: str | Path, head_dir: str | Path) -> float | None:
    """Refuse drafts that are hardly ever right; returns the acceptance of the first one in training, if it is known."""
    trained: float | None = next(iter((read_manifest(head_dir) or {}).get("acceptance") or []), None)
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
    return trained
