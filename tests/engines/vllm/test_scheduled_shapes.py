"""The way of a shape from the output of one step to the drafts of a later one."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.vllm.scheduled_shapes import note_shape, padded, schedule_shape, scheduled_drafts, tell_shape

CAPS, SMALL = Shape(3, 4, 16), Shape(2, 2, 4)


def step(b: int = 1) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.num_scheduled_tokens = {str(i): 1 for i in range(b)}
    made.num_spec_tokens_to_schedule = CAPS.width - 1
    return made


def end_of_step(scheduler: Any, shape: Shape | None, narrower: Sequence[tuple[int, Shape]] = ()) -> None:
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    if shape is not None:
        tell_shape(output, shape, narrower)
    sent = pickle.loads(pickle.dumps(output))  # between the processes of vLLM
    assert note_shape(lambda *given: given, scheduler, "step", sent) == (scheduler, "step", sent)


def scheduled(scheduler: Any, b: int = 1) -> tuple[int, Shape]:
    """What the worker reads of the next step, of b requests, and what vLLM's own method saw."""
    made, seen = step(b), []
    schedule_shape(lambda _, output: seen.append(output.num_spec_tokens_to_schedule), scheduler, made)
    sent = pickle.loads(pickle.dumps(made))
    assert seen == [sent.num_spec_tokens_to_schedule]
    return scheduled_drafts(sent, CAPS)


def test_the_newest_shape_is_scheduled() -> None:
    scheduler = SimpleNamespace()
    assert scheduled(scheduler) == (15, CAPS)
    end_of_step(scheduler, None)  # a worker that has nothing to tell, or vLLM's own
    assert scheduled(scheduler) == (15, CAPS)
    for shape in (SMALL, PLAIN, CAPS):
        end_of_step(scheduler, shape)
        assert scheduled(scheduler) == scheduled(scheduler) == (shape.width - 1, shape)
        end_of_step(scheduler, None)
        assert scheduled(scheduler) == (shape.width - 1, shape)


def test_a_batch_that_has_grown_has_a_shape_that_is_captured_for_it() -> None:
    scheduler, middle = SimpleNamespace(), Shape(3, 4, 8)
    end_of_step(scheduler, CAPS, [(64, middle), (128, SMALL), (256, PLAIN)])
    for most, shape in ((64, CAPS), (128, middle), (256, SMALL), (300, PLAIN)):
        assert scheduled(scheduler, most) == (shape.width - 1, shape)
    assert [scheduled(scheduler, b)[1] for b in (1, 65, 129, 257)] == [CAPS, middle, SMALL, PLAIN]
    end_of_step(scheduler, SMALL, [(256, PLAIN)])
    assert [scheduled(scheduler, b)[1] for b in (1, 129, 257)] == [SMALL, SMALL, PLAIN]


def test_a_scheduler_that_does_not_call_vllms_method() -> None:
    """The worker drafts the caps, for which such a step has room."""
    scheduler = SimpleNamespace()
    end_of_step(scheduler, SMALL)
    assert scheduled_drafts(step(), CAPS) == (15, CAPS)


def test_padding() -> None:
    """vLLM reads as many drafted tokens of each request as it made placeholders."""
    tokens = torch.arange(6).view(2, 3)
    assert padded(tokens, 0) is tokens and padded(tokens, 3) is tokens
    assert padded(tokens, 5).tolist() == [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]]
    assert padded(tokens[:, :0], 2).tolist() == [[0, 0], [0, 0]]
