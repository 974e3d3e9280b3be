"""Says which target a server serves, as its flags name it, and finds its files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eagle_plugin.common.hub_cache import model_name

_TOLD = "_EAGLE_CAPTURE_SERVED"  # in the environment of an engine's other processes


@dataclass(frozen=True)
class ServedTarget:
    """What answers the requests. The writer process tells it from other targets by the digests of its files."""

    name: str  # the last part of the model's path or name on the hub: of it alone nobody learns where files are
    folder: str  # of the target; or its name on the hub, until `located` has found it
    revision: str | None = None  # of the name on the hub
    tokenizer: str | None = None  # a folder or a name, where it is not that of the target
    chat_template: str | None = None  # a file or a text, where it is not that of the tokenizer

    @classmethod
    def of(
        cls,
        model: str,
        revision: str | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
    ) -> ServedTarget:
        """From the flags of an engine: model and tokenizer are folders, or names on the hub."""
        name = model_name(model) if Path(model).exists() else Path(model).name
        return cls(name, model, revision, None if tokenizer == model else tokenizer, chat_template)

    def located(self) -> ServedTarget:
        """The same with folders in place of names on the hub, where the hub's cache has them.

        To be asked when the engine has loaded the target, and in the engine's environment.
        """
        tokenizer = None if self.tokenizer is None else _folder(self.tokenizer, None)
        return replace(self, folder=_folder(self.folder, self.revision), tokenizer=tokenizer)


def tell_processes(model: str, served: ServedTarget | None) -> None:
    """Tell the processes that this one starts how the target is called in metrics, and which one it is."""
    os.environ[_TOLD] = json.dumps({"model": model, "served": asdict(served) if served else None})


def told_served() -> tuple[str, ServedTarget | None]:
    """What the process that started this one has told; ("", None) if nothing."""
    found = json.loads(os.environ.get(_TOLD, "{}"))
    served = found.get("served")
    return found.get("model", ""), ServedTarget(**served) if served else None


def _folder(name: str, revision: str | None) -> str:
    if Path(name).exists():
        return str(Path(name).absolute())
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):  # no hub, or not a name that it could have
        return name
    return str(Path(found).parent) if isinstance(found, str) else name
