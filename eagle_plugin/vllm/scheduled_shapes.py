"""Brings the shapes that the worker chooses to vLLM's scheduler, which makes a step while the step before it runs.

Scheduled ahead, the rows of a step are made before anybody has its drafts. So the worker tells with the output of each
step which shape it would draft now, the scheduler hands the newest that it heard to the step that it makes next, and
the worker drafts in a step what the step says. It travels as an attribute of objects that vLLM sends between its
processes, so that all ranks draft alike. Before the scheduler has heard of a shape, or where it is a class of the
user's own that does not call vLLM's methods, a step has as many placeholders for drafts as the caps.

The worker chooses for the batch of its step, and the next one may have more requests: more than this shape is captured
for. So the shape comes with those of larger batches (`CapturedRounds.narrower`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from eagle_plugin.core.shape import Shape

_SHAPE = "eagle_plugin_shape"  # of a vLLM ``SchedulerOutput``
_SHAPES = "eagle_plugin_shapes"  # of a step's output, and of a scheduler: (b, shape of more than b requests), ascending


def tell_shape(output: Any, shape: Shape, narrower: Sequence[tuple[int, Shape]] = ()) -> None:
    """Let the output of a step [vLLM's ``ModelRunnerOutput``] tell the scheduler what would be drafted now.

    narrower: the shapes of larger batches, as of `CapturedRounds.narrower`.
    """
    setattr(output, _SHAPES, ((0, shape), *narrower))


def note_shape(original: Any, scheduler: Any, scheduler_output: Any, output: Any, *more: Any) -> Any:
    """AROUND the arrival of a step's output at the scheduler, which keeps the shape that it tells."""
    if (shapes := getattr(output, _SHAPES, None)) is not None:
        setattr(scheduler, _SHAPES, shapes)
    return original(scheduler, scheduler_output, output, *more)


def schedule_shape(original: Any, scheduler: Any, scheduler_output: Any) -> Any:
    """AROUND the end of scheduling a step ahead, which makes placeholders for the drafts of the step."""
    if (shapes := getattr(scheduler, _SHAPES, None)) is not None:
        b = len(scheduler_output.num_scheduled_tokens)
        shape = next((shape for above, shape in reversed(shapes) if b > above), shapes[0][1])
        setattr(scheduler_output, _SHAPE, shape)
        # vLLM's number is of the present batch, where a user limits drafts by its size: what is over is cut.
        most = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = min(shape.width - 1, most)
    return original(scheduler, scheduler_output)


def scheduled_drafts(scheduler_output: Any, caps: Shape) -> tuple[int, Shape]:
    """The placeholders for the drafts of a step, per request, and the shape that it drafts."""
    return scheduler_output.num_spec_tokens_to_schedule, getattr(scheduler_output, _SHAPE, caps)


def padded(tokens: Tensor, placeholders: int) -> Tensor:
    """Drafted tokens [b, W - 1] with zeros up to the step's placeholders, which vLLM reads whatever was drafted."""
    b, drafted = tokens.shape
    if drafted >= placeholders:
        return tokens
    filled = tokens.new_zeros(b, placeholders)
    filled[:, :drafted] = tokens
    return filled
