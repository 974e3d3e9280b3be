"""What the data commands read from a target's folder besides its weights: tokenizer, stop tokens, vocabulary size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_plugin.data.rows import DataError


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a target's folder, without running code that comes with it.

    Raises:
        DataError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json; give the target's own folder")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder} has no tokenizer that loads ({reason}); give the target's own folder") from error


def stop_token_ids(folder: str | Path) -> list[int]:
    """The ids that end an answer of the target, ascending: eos_token_id of generation_config.json and config.json.

    Raises:
        DataError: neither file names one.
    """
    folder = Path(folder)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = json.loads(path.read_text()) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            eos = part.get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not found:
        raise DataError(f"{folder} names no eos_token_id in generation_config.json or config.json; add it there")
    return sorted(found)


def read_vocab_size(folder: str | Path) -> int:
    """The number of token ids of the target, from its config.json."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return int((config.get("text_config") or config)["vocab_size"])
