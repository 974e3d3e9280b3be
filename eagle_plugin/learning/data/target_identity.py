"""Which target it is: digests of its files, and whether recorded answers are of the target that a head is for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.target_files import read_target_json

SAMPLED_BYTES = 1 << 20  # hashed of each end of a weight file; hashing all of a 140 GB target would take minutes
DIGESTS = ("config_sha256", "weights_sha256", "tokenizer_sha256", "template_sha256")
NAME = "name"  # beside the digests in a record: the last part of the model's path or name


def target_digests(
    folder: str | Path, tokenizer: str | Path | None = None, chat_template: str | None = None
) -> dict[str, str]:
    """sha256 of a target's config, weights, tokenizer and chat template, by the names in `DIGESTS`.

    If the folder lacks a part, the digest is that of no bytes. The tokenizer's digest is without its chat template. Of
    the weights, names, sizes, first and last bytes are hashed.

    Args:
        tokenizer: folder of the tokenizer and its template, where it is another one.
        chat_template: in place of the tokenizer's: a file, or the text itself.
    """
    folder = Path(folder)
    own = Path(tokenizer or folder)
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json; give the target's own folder")
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        weights.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            weights.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            weights.update(file.read(SAMPLED_BYTES))
    tokens = next((p for name in ("tokenizer.json", "tokenizer.model") if (p := own / name).is_file()), None)
    return {
        "config_sha256": _sha256((folder / "config.json").read_bytes()),
        "weights_sha256": weights.hexdigest(),
        "tokenizer_sha256": _sha256(tokens.read_bytes() if tokens else b""),
        "template_sha256": _sha256(_chat_template(own) if chat_template is None else _given_template(chat_template)),
    }


class TargetCheck:
    """Finds recorded answers of another target than the one in `folder`, and counts those that do not say theirs."""

    def __init__(self, folder: str | Path | None, advice: str, skips: bool = False) -> None:
        """Check against one target.

        Args:
            folder: of the target; None only counts.
            advice: the end of the sentence that refuses: what to do.
            skips: answers of another target are left out, and not refused.
        """
        self._folder, self._advice, self._skips = folder, advice, skips
        self._own: dict[str, str] | None = None
        self.unnamed = self.name_only = 0  # answers without a target, and with the name of one only

    def add(self, target: Mapping[str, Any] | None, where: str) -> bool:
        """Check one answer; False if it is to be left out.

        Args:
            target: what the record says: name and digests, only a name, or None.
            where: the place of the record or the name of the prompt, for the error.

        Raises:
            DataError: it is of another target.
        """
        if not target:
            self.unnamed += 1
            return True
        digested = all(target.get(name) for name in DIGESTS)
        if self._folder is not None and self._own is None:
            self._own = {NAME: Path(self._folder).resolve().name, **target_digests(self._folder)}
        compared = DIGESTS if digested else (NAME,)
        wrong = [name for name in compared if self._own and target.get(name) != self._own[name]]
        if wrong and self._skips:
            return False
        if wrong:
            raise DataError(
                f"{where} was answered by {target.get(NAME)}, and the target {self._folder} is another one "
                f"({', '.join(wrong)} differ); {self._advice}"
            )
        self.name_only += not digested
        return True

    def note(self) -> str | None:
        """One sentence on the answers that could not be compared by their digests; None if there are none."""
        parts = []
        if self.unnamed:
            parts.append(f"{self.unnamed:,} recorded answers do not say which target gave them")
        if self.name_only:
            parts.append(f"{self.name_only:,} recorded answers have the name of their target without digests")
        if not parts:
            return None
        return f"{', and '.join(parts)}: make sure that it is the target that the head is for"


def _given_template(template: str) -> bytes:
    try:
        return Path(template).read_bytes()
    except (OSError, ValueError):  # a text, or a name that the engine knows
        return template.encode()


def _chat_template(folder: Path) -> bytes:
    own, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own.is_file():
        return own.read_bytes()
    if settings.is_file():
        return json.dumps(read_target_json(settings).get("chat_template") or "").encode()
    return b""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
