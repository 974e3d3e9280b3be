"""What one loop does: model, prompts, training and sizes. It is kept beside the results, which depend on all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from eagle_plugin.bench.spec import EngineName
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.errors import UserError

Count = Annotated[int, Field(gt=0)]


class LoopError(UserError):
    """The loop cannot start or go on; the sentence says why."""


class LoopSettings(BaseModel):
    """Everything that the results depend on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineName = "sglang"
    target: str = "smollm2-135m-instruct"
    head: str = "smollm2-135m-instruct-eagle3"
    prompts: Path | None = None  # own prompts, a file of `data prepare`; None: questions about the standard library
    count: Count = 300  # prompts that are asked and trained on
    held_out: Count = 40  # prompts that only measurements ask
    answer_tokens: Count = 192  # longest answer of the traffic
    traffic_concurrency: Count = 32
    epochs: Count = 8
    lr: float = Field(default=1e-3, gt=0)
    batch_tokens: Count = 2048
    eval_tokens: Count = 128  # longest answer on which accept lengths are measured
    concurrency: tuple[Count, ...] = (1, 4, 8)
    repeats: Count = 3
    bench_tokens: Count = 64  # mean longest answer of the benchmark
    swap_clients: Count = 3
    swap_questions: Count = 9
    swap_tokens: Count = 48


def keep_settings(settings: LoopSettings, path: Path) -> None:
    """Write the settings, or compare them with those that the folder was begun with.

    Raises:
        LoopError: the folder has results of other settings.
    """
    wanted = settings.model_dump(mode="json")
    found = _read(path)
    if found is None:
        write_output(path, [json.dumps(wanted, indent=1), "\n"])
    elif found != wanted:
        names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        changes = ", ".join(f"{name} {found.get(name)} (now {wanted.get(name)})" for name in names)
        raise LoopError(
            f"{path.parent} was begun with other settings: {changes}; give these again, another --out, "
            f"or remove {path.parent} to begin again"
        )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LoopError(f"{path} cannot be read ({error}); remove {path.parent} to begin again") from error
    return found if isinstance(found, dict) else {}
