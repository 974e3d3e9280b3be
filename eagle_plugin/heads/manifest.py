"""eagle_plugin.json beside a head's weights: the target that it was trained for, its training and its acceptance.

The engines do not read it. torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from eagle_plugin.common.hub_cache import model_name
from eagle_plugin.heads.files import HeadError, levels_of, read_json
from eagle_plugin.heads.kinds import HeadSpec
from eagle_plugin.policy.shapes import PARALLEL_LEVELS

MANIFEST = "eagle_plugin.json"
FORMAT = 1
DIGEST_OF_NOTHING = hashlib.sha256(b"").hexdigest()  # tokenizer or template may be in another folder


def describe_target(folder: str | Path) -> dict[str, str]:
    """name and sha256 digests of a target's config.json, vocabulary and chat template.

    The vocabulary's digest is over its tokens and their ids, so that a tokenizer.json saved by another version of a
    library has the same digest. A missing file has the digest of no bytes, `DIGEST_OF_NOTHING`.
    """
    folder = Path(folder)
    own, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    template = own.read_bytes() if own.is_file() else b""
    if not template and settings.is_file():
        template = str(read_json(settings).get("chat_template") or "").encode()
    config = folder / "config.json"
    return {
        "name": model_name(folder),
        "config_sha256": _sha256(config.read_bytes() if config.is_file() else b""),
        "vocabulary_sha256": _sha256(_vocabulary(folder)),
        "template_sha256": _sha256(template.rstrip()),
    }


def _vocabulary(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((p for name in ("tokenizer.model", "vocab.json") if (p := folder / name).is_file()), None)
        return other.read_bytes() if other else b""
    tokenizer = read_json(path)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {token: i for i, (token, _) in enumerate(vocabulary)}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return json.dumps(sorted(ids.items())).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The manifest of a head's folder, or None where it has none.

    Raises:
        HeadError: it was not written by eagle-plugin, or by a newer version.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            raise HeadError(f"{path} has format {values['format']!r}, wanted {FORMAT}; update eagle-plugin")
        values["aux_layers"] = tuple(int(i) for i in values["aux_layers"])
        if not isinstance(values["target"], dict):
            raise TypeError(f"target is a {type(values['target']).__name__}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise HeadError(
            f"{path} is not a manifest of a head ({error!r}); export the head again or remove it"
        ) from error
    return values


def trained_depths(folder: str | Path) -> int | None:
    """How many levels a P-EAGLE head was trained to draft in one forward, at last; None where nothing says so.

    Raises:
        HeadError: as `read_manifest`.
    """
    manifest = read_manifest(folder)
    try:
        return int((manifest or {})["training"]["recipe"]["phases"][-1]["steps"])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None  # trained by another project, or not at all


def parallel_levels(folder: str | Path | None) -> int | None:
    """How many levels trees of a head get by default if it drafts all of them in one forward (P-EAGLE), else None.

    As many as it was trained for, or `PARALLEL_LEVELS` where nothing says how many. None also for what is no folder of
    this disk.

    Raises:
        HeadError: config.json or the record of the export cannot be read.
    """
    if folder is None or not (Path(folder) / "config.json").is_file():
        return None
    if not levels_of(read_json(Path(folder) / "config.json"), folder).depth_is_free:
        return None
    return trained_depths(folder) or PARALLEL_LEVELS


def fewer_levels(head: str | Path, spec: HeadSpec, steps: int | None) -> list[str]:
    """A warning where a head that drafts all levels in one forward was trained for fewer than `steps` of them."""
    depths = trained_depths(head) if spec.levels.depth_is_free else None
    if steps is None or depths is None or depths >= steps:
        return []
    return [
        f"{head} was trained to draft {depths} tokens in one forward, so its trees have {depths} levels and not "
        f"{steps}; train it with phases.steps {steps} for deeper ones"
    ]


def compare_target(manifest: dict[str, Any], target_dir: str | Path, head_dir: str | Path) -> list[str]:
    """Warnings about a target that differs from the one that the head was trained for.

    Raises:
        HeadError: its token ids have other meanings.
    """
    trained, found = manifest["target"], describe_target(target_dir)
    known = {key: digest for key, digest in found.items() if key != "name" and digest != DIGEST_OF_NOTHING}
    differs = {key for key, digest in known.items() if trained.get(key, digest) != digest}
    if "vocabulary_sha256" in differs:
        raise HeadError(
            f"{head_dir} was trained for {trained.get('name')}, whose tokens have other ids than in {target_dir}; "
            "use the head that was trained for this target"
        )
    warnings = []
    if "template_sha256" in differs:
        warnings.append(
            f"{head_dir} was trained with another chat template than that of {target_dir}, which lowers acceptance; "
            "train the head on rows rendered with this one"
        )
    if "config_sha256" in differs:
        warnings.append(
            f"{head_dir} was trained for {trained.get('name')} with another config.json than that of {target_dir}; "
            "measure its acceptance before serving it"
        )
    return warnings
