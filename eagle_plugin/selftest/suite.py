"""Runs every check of the self-test on one device, and says in one report what differed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from eagle_plugin.common.device_memory import is_out_of_memory
from eagle_plugin.kernels import loader
from eagle_plugin.selftest import cache_kernels, sampling_kernels, toy_round, tree_kernels
from eagle_plugin.selftest.failure import NO_MEMORY, LeftOut
from eagle_plugin.selftest.shapes import ModelShape, sizes_for
from eagle_plugin.selftest.trial import Check, Trial

SEED = 2026
TRIES = 2  # with other random inputs, of a check in which rounding may decide


class Finding(NamedTuple):
    """What one check found."""

    check: str
    differences: list[str]
    compared: int  # values
    worst: float  # the largest difference of a float, as a part of what is allowed
    seconds: float
    ran_out: bool = False  # of memory, so that the check says nothing

    @property
    def sentence(self) -> str:
        """What differed, for the log: the first difference, and how many more there are."""
        more = f" (and {len(self.differences) - 1} more)" if len(self.differences) > 1 else ""
        return f"{self.check}: {self.differences[0]}{more}"


class Report(NamedTuple):
    """What all checks found."""

    findings: list[Finding]

    @property
    def reasons(self) -> list[str]:
        """One sentence per check that failed."""
        return [finding.sentence for finding in self.findings if finding.differences]

    @property
    def left_out(self) -> list[LeftOut]:
        """One sentence per check that ran out of memory."""
        return [LeftOut(f"{finding.check}: {NO_MEMORY}") for finding in self.findings if finding.ran_out]

    @property
    def seconds(self) -> float:
        return sum(finding.seconds for finding in self.findings)


def checks_on(device: torch.device) -> tuple[Check, ...]:
    """Every check that this kind of device has kernels for.

    The torch path reads values on the host, so that no round on it can be captured; on a GPU that is a fault.
    """
    own = cache_kernels.ON_CPU if device.type == "cpu" else ()
    kernels = tree_kernels.CHECKS + sampling_kernels.CHECKS + cache_kernels.CHECKS + own
    if loader.backend(device.type) == "native":
        return kernels + toy_round.CHECKS
    return kernels if device.type == "cpu" else (Check("native library", _no_library), *kernels)


def _no_library(trial: Trial) -> None:
    trial.differences.append(
        f"there is none for {trial.device.type} tensors, the log says why; a wheel of eagle-plugin ships one, and nvcc "
        "builds one"
    )


def run(device: torch.device | str, model: ModelShape, progress: Callable[[str], None] = lambda name: None) -> Report:
    """Run all checks with tensors on `device`; progress gets the name of each before it begins.

    A check that raises has failed: what it raised is the difference. One that runs out of memory has not, and the
    others still run.
    """
    device = torch.device(device)
    findings = []
    progress("building kernels, if this is their first use")
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, exact_products(), torch.no_grad():
        for check in checks_on(device):
            progress(check.name)
            findings.append(run_check(check, device, model))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Report(findings)


def differences(device: torch.device | str, model: ModelShape) -> list[str]:
    """What `run` found, for `decide`: one sentence per check that failed, and one that is `LeftOut` per other check
    that ran out of memory."""
    report = run(device, model)
    return [*report.reasons, *report.left_out]


def run_check(check: Check, device: torch.device, model: ModelShape) -> Finding:
    """Run one check; again on other inputs where rounding may have decided."""
    begin = time.perf_counter()
    for number in range(TRIES + 1 if check.rounding_decides else 1):
        trial = Trial(model, sizes_for(device, model), device, SEED + number)
        try:
            check.run(trial)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # of any kind: a kernel that cannot run is left to the engine as a wrong one is
            if is_out_of_memory(error):
                return Finding(check.name, [], trial.compared, trial.worst, time.perf_counter() - begin, ran_out=True)
            first = (str(error).strip() or "no message").splitlines()[0]
            trial.differences.append(f"{type(error).__name__}: {first}")
        if number == 0:
            first_trial = trial
        if not trial.differences:
            break
    # Right on the inputs of a second try: rounding decided on those of the first.
    differences = trial.differences and first_trial.differences
    return Finding(check.name, differences, first_trial.compared, first_trial.worst, time.perf_counter() - begin)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Within this block the oracles' float32 products are not rounded to TF32, whatever the engine has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
