"""Runs a job of `eagle-plugin optimize` on a Ray cluster, by Ray's own jobs: Ray chooses the machine and its GPUs.

What Ray runs is `eagle-plugin optimize resume NAME`. The folder of the jobs says how it is doing, as anywhere; Ray says
what that folder cannot: that a job waits for a machine, or that its machine is gone.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from eagle_plugin.common.installed import install_command
from eagle_plugin.learning.jobs.recipe import JobError

ENDED = ("STOPPED", "SUCCEEDED", "FAILED")  # of Ray's states; the others are PENDING and RUNNING


class RayRun(NamedTuple):
    """A job that was given to a cluster."""

    address: str  # of the cluster's dashboard, as http://HOST:8265
    id: str  # Ray's name of it

    @classmethod
    def of(cls, written: bytes) -> RayRun:
        """What `to_bytes` wrote."""
        return cls(**json.loads(written))

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(self._asdict()).encode()

    def state(self) -> tuple[str, str]:
        """Ray's state, and what it says of it. Raises JobError."""
        with _asked(self.address):
            found = _client(self.address).get_job_info(self.id)
        return found.status.value, found.message or ""

    def stop(self) -> None:
        """End it at once; what is done of the job stays. Raises JobError."""
        with _asked(self.address):
            _client(self.address).stop_job(self.id)


def submit(address: str, name: str, jobs: str, cpus: float, gpus: float) -> RayRun:
    """Let a cluster run a job: it waits until one machine has so many cores and GPUs free.

    jobs: folder or URL of the jobs, which every machine of the cluster must see by this name.

    Raises:
        JobError: the cluster cannot be asked.
    """
    command = ("eagle-plugin", "optimize", "resume", name, "--jobs", jobs)
    with _asked(address):
        run = _client(address).submit_job(
            entrypoint=shlex.join(command),
            submission_id=f"eagle-{name}-{time.time_ns() // 1_000_000}",
            entrypoint_num_cpus=cpus,
            entrypoint_num_gpus=gpus or None,
            metadata={"job": name, "jobs": jobs},
        )
    return RayRun(address, run)


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise JobError(f"--ray needs the Python package ray: {install_command('ray')}") from error
    return JobSubmissionClient(address)


@contextmanager
def _asked(address: str) -> Iterator[None]:
    """Ray's errors as one sentence."""
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise JobError(
            f"--ray {address}: the cluster does not take that ({reason}); give the address of its dashboard, as "
            "http://HOST:8265"
        ) from error
