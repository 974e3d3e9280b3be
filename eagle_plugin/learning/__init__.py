"""From prompts to a deployed head: data, training, evaluation, jobs, deployment, reports.

`Job` is `eagle-plugin optimize create | list | describe | stop | resume` for Python programs (docs/jobs.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_plugin.learning.jobs.job import Job

__all__ = ["Job"]


def __getattr__(name: str) -> Any:
    """Import `Job` when it is asked for: the modules below this package must not all be loaded for one of them."""
    if name != "Job":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eagle_plugin.learning.jobs.job import Job

    return Job
