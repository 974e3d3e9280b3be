"""Says which target a server serves, as its flags name it, and finds its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


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
        name = (Path(model).resolve() if Path(model).exists() else Path(model)).name
        return cls(name, model, revision, None if tokenizer == model else tokenizer, chat_template)

    def located(self) -> ServedTarget:
        """The same with folders in place of names on the hub, where the hub's cache has them.

        To be asked when the engine has loaded the target, and in the engine's environment.
        """
        tokenizer = None if self.tokenizer is None else _folder(self.tokenizer, None)
        return replace(self, folder=_folder(self.folder, self.revision), tokenizer=tokenizer)


def _folder(name: str, revision: str | None) -> str:
    if Path(name).exists():
        return str(Path(name).absolute())
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):  # no hub, or not a name that it could have
        return name
    return str(Path(found).parent) if isinstance(found, str) else name
