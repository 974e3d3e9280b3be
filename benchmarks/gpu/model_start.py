"""Engines that start at the same time; those of vLLM that do not start compiled start again with graphs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack

from benchmarks.gpu.model_cases import COMPILED, modes_of
from benchmarks.gpu.model_process import START_LIMIT, EngineProcess
from benchmarks.gpu.steps import Setting, StepError

# Seconds in which engines of vLLM must start compiled; on an H200 the first start of one alone took 55 s.
COMPILED_LIMIT = 150.0


def start_all(
    names: Iterable[str],
    start: Callable[[str, str], AbstractContextManager[EngineProcess]],
    setting: Setting,
    stack: ExitStack,
    failed: dict[str, str],
) -> dict[str, EngineProcess]:
    """The engines that serve, by name; why the others do not goes to `failed`. All of them end with the stack.

    start: called with a name and a mode of `model_cases.modes_of`. An engine that does not start in the first mode
    starts again in the next one; one in which the plugin does not serve does not.
    """
    found: dict[str, EngineProcess] = {}
    left = list(names)
    order = list(left)
    for mode in modes_of(setting.engine or "sglang", setting.on_gpu):
        for name in left:
            failed.pop(name, None)
        starting = {name: stack.enter_context(start(name, mode)) for name in left}
        limit = COMPILED_LIMIT if mode == COMPILED else START_LIMIT[setting.on_gpu]
        found |= wait_for_all(starting, failed, limit)
        left = [name for name, engine in starting.items() if name in failed and not engine.has_started]
        if not left:
            break
    return {name: found[name] for name in order if name in found}


def wait_for_all(starting: dict[str, EngineProcess], failed: dict[str, str], limit: float) -> dict[str, EngineProcess]:
    """The engines that serve, all waited for at the same time; why the others do not goes to `failed`."""
    pool = ThreadPoolExecutor(len(starting))
    waits = {pool.submit(engine.wait_until_it_serves, limit): name for name, engine in starting.items()}
    try:
        for done in as_completed(waits):
            name, error = waits[done], done.exception()
            if error is None:
                how = f" ({starting[name].mode})" if starting[name].mode else ""
                print(f"{starting[name].case.what} started in {done.result():.0f} s{how}", flush=True)
            elif isinstance(error, StepError):
                failed[name] = str(error)
                print(error, flush=True)
                starting[name].end()
            else:
                raise error
    finally:
        pool.shutdown(wait=False)
    return {name: engine for name, engine in starting.items() if name not in failed}
