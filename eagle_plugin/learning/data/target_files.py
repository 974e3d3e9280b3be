"""What the data commands read from a target's folder besides its weights: tokenizer, stop tokens, vocabulary size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_plugin.common.errors import first_line
from eagle_plugin.common.json_files import read_object
from eagle_plugin.learning.data.rows import DataError


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a target's folder, without running code that comes with it.

    Raises:
        DataError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    read_target_json(folder / "config.json")  # its errors name the file, those of transformers guess
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = first_line(error)
        raise DataError(f"{folder} has no tokenizer that loads ({reason}); give the target's own folder") from error


def stop_token_ids(folder: str | Path) -> list[int]:
    """The ids that end an answer of the target, ascending: eos_token_id of generation_config.json and config.json.

    Raises:
        DataError: neither file names one, or a file cannot be read.
    """
    folder = Path(folder)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = read_target_json(folder / name, needed=name == "config.json")
        for part in (config, config.get("text_config") or {}):
            eos = part.get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not found:
        raise DataError(f"{folder} names no eos_token_id in generation_config.json or config.json; add it there")
    return sorted(found)


def read_vocab_size(folder: str | Path) -> int:
    """The number of token ids of the target, from its config.json."""
    path = Path(folder) / "config.json"
    config = read_target_json(path)
    size = (config.get("text_config") or config).get("vocab_size")
    if size is None:
        size = _default_vocab_size(folder)
    if type(size) is not int or size < 1:
        raise DataError(f"{path} has vocab_size {size!r}, wanted a positive whole number; give the target's own folder")
    return size


def _default_vocab_size(folder: str | Path) -> Any:
    """That of the class of the config, which Gemma 3 does not repeat in its file; None where there is none."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # of as many kinds as there are classes; the sentence about the missing key says what to do
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def read_target_json(path: Path, needed: bool = True) -> dict[str, Any]:
    """The object in a JSON file of a target; empty if the file is missing and not needed.

    Raises:
        DataError: it is missing, cannot be read, or is something else.
    """
    try:
        return read_object(path, DataError, "copy the target again")
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise DataError(f"{path.parent} has no {path.name}; give the target's own folder") from error
