"""Runs a state machine of hypothesis: the same examples every time."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS = 40  # of an example


def run(machine: type[RuleBasedStateMachine], examples: int, shrinks: bool = True) -> None:
    """Let so many examples run; AssertionError, or what the code under test raises, for the first that fails.

    shrinks: a failing example is cut to fewer steps, which takes minutes; controls need none.
    """
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
