"""Step `graphs`: every captured phase gives what the eager one gives, and no eager phase makes the host wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.decoding import TreeDecoder, new_slot_table
from benchmarks.gpu.models import SMALL
from benchmarks.gpu.phases import Round, capturing, differences, tensors_of
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.graphs import Capturer

CASES = ((1, Shape(3, 4, 16), 0.0), (5, Shape(3, 4, 16), 0.0), (3, Shape(4, 2, 8), 0.9), (8, Shape(2, 8, 32), 0.9))
POSITIONS = 300
TOLERANCE = 1e-4  # of float32 results: a captured matrix product may be another algorithm than the eager one


def run(setting: Setting) -> dict[str, Any]:
    """Compare on random states, each phase on the captured outputs of the phase before; StepError for a difference."""
    with capturing(setting) as new_capturer:
        found = [check_case(setting, new_capturer(), *case) for case in CASES]
    return {"graphs": "CUDA" if setting.on_gpu else "emulated", "cases": found}


def check_case(setting: Setting, capturer: Capturer, batch: int, shape: Shape, temperature: float) -> dict[str, Any]:
    """Capture the phases of one batch and shape, and compare; then run a round without a host wait."""
    inputs = 4 if setting.tiny else 100
    target = SMALL.target(POSITIONS, setting.device)
    slot_table = new_slot_table(batch, POSITIONS, setting.device)
    decoder = TreeDecoder(target, SMALL.head(target, slot_table), slot_table, shape, temperature)
    captured = Round(decoder, capturer)
    for number in range(inputs):
        randomise(decoder, number)
        compare(decoder, captured, f"input {number} of batch {batch}, shape {shape}, temperature {temperature}")
    about = {"batch": batch, "shape": str(shape), "temperature": temperature, "inputs": inputs}
    return about | {"host_waits_checked": run_without_waits(decoder.round, setting)}


def randomise(decoder: TreeDecoder, seed: int) -> None:
    """Give every request another length and root, and the head other proposals and hidden states."""
    generator = torch.Generator(device=decoder.target.device).manual_seed(seed)
    vocabulary = decoder.target.model.vocabulary
    decoder.lengths.random_(1, POSITIONS - 2 * decoder.shape.reach, generator=generator)
    decoder.roots.random_(0, vocabulary, generator=generator)
    decoder.state.hidden.normal_(generator=generator)
    top = decoder.state.top
    scores = torch.randn(top.logp.shape, device=top.logp.device, generator=generator)
    top.logp.copy_(scores.sort(descending=True).values.log_softmax(-1))
    drafts = vocabulary if decoder.head.draft_to_target is None else len(decoder.head.draft_to_target)
    ranks = torch.rand(len(scores), drafts, device=scores.device, generator=generator)
    top.tokens.copy_(ranks.argsort(-1)[:, : top.tokens.shape[1]])


def compare(decoder: TreeDecoder, captured: Round, case: str) -> None:
    """Replay the phases one after the other, and run each eagerly on the same inputs."""
    eager: dict[str, Callable[[], Any]] = {
        "draft": decoder.draft,
        "verify": lambda: decoder.verify(captured.draft.out),
        "tail": lambda: decoder.tail(captured.draft.out, captured.verify.out),
        "extend": lambda: decoder.extend(captured.tail.out),
    }
    state = [decoder.lengths, decoder.roots, *decoder.state.top, decoder.state.hidden]
    written = {"tail": [*decoder.cache.keys, *decoder.cache.values], "extend": state}
    for name, replay in captured.phases().items():
        changed = written.get(name, [])
        before = [tensor.clone() for tensor in changed]
        found = [tensor.clone() for tensor in (*tensors_of(replay()), *changed)]
        for tensor, saved in zip(changed, before, strict=True):
            tensor.copy_(saved)
        wanted = [*tensors_of(eager[name]()), *changed]
        if wrong := differences(found, wanted, TOLERANCE):
            raise StepError(f"the captured {name} is not the eager one for {case}: {wrong[0]}")


def run_without_waits(call: Callable[[], Any], setting: Setting) -> bool:
    """Call it while torch refuses every operation that makes the host wait for the device; False on a CPU."""
    with refusing_waits(setting):
        try:
            call()
        except RuntimeError as error:
            raise StepError(f"a round makes the host wait for the device: {str(error).splitlines()[0]}") from error
    return setting.on_gpu


@contextlib.contextmanager
def refusing_waits(setting: Setting) -> Iterator[None]:
    """Inside the block torch raises at a synchronising operation."""
    if not setting.on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
