"""What job.json says of a stage: whether it is done, and with which settings it began."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from eagle_plugin.learning.data.target_identity import target_digests
from eagle_plugin.learning.jobs.stage import Stage

FOLDER = "folder"  # beside the digests of a model: where it was
MODEL_NAME = ".model.json"  # of the files of answers: the name of the model that the servers gave


def identity_of(model: Path | None) -> dict[str, str] | None:
    """The digests of a target or head with its folder, for the settings of a stage.

    A folder that was moved, or another commit of a hub's repository with the same files, has the same digests. What has
    no config.json has its folder alone.
    """
    if model is None:
        return None
    return {FOLDER: str(model), **(target_digests(model) if (model / "config.json").is_file() else {})}


def is_done(stage: Stage, done: dict[str, str], digest: str) -> bool:
    """Whether the output is there, and of these stages and settings; digest: of all stages up to this one."""
    same = stage.settings is None or not _began_otherwise(stage, done, digest)
    return same and done.get(stage.name) == digest and stage.output.exists()


def note_settings(stage: Stage, done: dict[str, str], digest: str) -> bool:
    """Note with which settings the stage began; whether the record had others, or fewer."""
    key, now = _begun(stage), digest if stage.settings is None else stage.settings
    changed = done.get(key) != now
    done[key] = now
    return changed


def begin_anew(stage: Stage, done: dict[str, str], digest: str) -> str:
    """Put away what the stage would continue, if it began with other settings; note those that it begins with.

    Files of a stage that has settings get the ending .before: the target's answers can be the work of days. Folders of
    features, which are computed from answers, are removed, as is all of a stage without settings.

    Returns a sentence about it; empty if nothing was put away.
    """
    found = [path for path in stage.partial if path.exists()]
    is_other, sentence = _began_otherwise(stage, done, digest), ""
    if is_other and found:
        kept = [_put_away(path) for path in found if stage.settings is not None and path.is_file()]
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        what = "its target or settings are" if stage.settings is not None else "what comes before it is"
        sentence = f"{stage.name}: begins anew, because {what} not those of the run before"
        sentence += f"; what that run made is kept as {', '.join(kept)}" if kept else ""
    elif not is_other and _may_have_another_name(stage, done):
        for path in stage.partial:
            if path.name.endswith(MODEL_NAME):
                path.unlink(missing_ok=True)
    note_settings(stage, done, digest)
    return sentence


def _put_away(path: Path) -> str:
    """Rename a file; returns its new name."""
    ends = itertools.chain([".before"], (f".before-{n}" for n in itertools.count(2)))
    free = next(name for end in ends if not (name := path.with_name(path.name + end)).exists())
    return path.rename(free).name


def _began_otherwise(stage: Stage, done: dict[str, str], digest: str) -> bool:
    noted = done.get(_begun(stage))
    if stage.settings is None:
        return noted != digest
    if noted is None:
        return False
    before, now = _values(noted), json.loads(stage.settings)
    # Jobs of earlier versions noted fewer settings of a stage, or none.
    return before is None or len(before) > len(now) or not all(map(_is_same, before, now))


def _is_same(before: Any, now: Any) -> bool:
    if not isinstance(now, dict) or FOLDER not in now:
        return bool(before == now)
    if not isinstance(before, dict):
        return bool(before == now[FOLDER])  # an earlier version noted the folder alone
    old, new = ({name: value for name, value in one.items() if name != FOLDER} for one in (before, now))
    return old == new if old and new else before.get(FOLDER) == now[FOLDER]


def _may_have_another_name(stage: Stage, done: dict[str, str]) -> bool:
    """Whether the answers are of the same target, which this job serves by itself, perhaps from another folder.

    `data generate` knows a server's target by the name of its folder alone, and would refuse to continue the answers.
    """
    noted = _values(done.get(_begun(stage), ""))
    is_own = stage.needs_server or stage.module is not None
    return is_own and stage.settings is not None and noted is not None and len(noted) == len(json.loads(stage.settings))


def _values(noted: str) -> list[Any] | None:
    try:
        found = json.loads(noted)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _begun(stage: Stage) -> str:
    return f"begun: {stage.name}"
