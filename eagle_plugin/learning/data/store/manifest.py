"""The manifest of a feature store: the target and the settings that determine every value in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from eagle_plugin.collect.settings import FORMS, StatesForm
from eagle_plugin.common.errors import json_fault
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.target_identity import target_digests

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The identity of a feature store; two runs may write to one store only when all fields agree."""

    target: str  # name of the target's folder, for readers only
    config_sha256: str
    weights_sha256: str  # of the weight files' names, sizes, first and last bytes
    tokenizer_sha256: str
    template_sha256: str
    aux_layers: tuple[int, ...]  # layers whose INPUT is stored (id i = hidden_states[i]); empty: last only
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: str  # in which the target computed
    max_length: int  # tokens; longer rows were cut on the right
    logit_factor: float = 1.0  # logits = softcap(logit_factor * lm_head(last))
    softcap: float | None = None
    version: int = VERSION
    states: StatesForm = "bfloat16"  # in which they are stored

    @property
    def states_bytes(self) -> int:
        """Bytes of a token's states in bfloat16, as the target computes them."""
        return 2 * self.hidden_size * (len(self.aux_layers) + 1)

    def to_json(self) -> bytes:
        """The manifest as the bytes of manifest.json."""
        return (json.dumps(self._values(), indent=1) + "\n").encode()

    def _values(self) -> dict[str, Any]:
        """All fields; without the form of the states where it is the one that all stores had once."""
        values = asdict(self)
        if self.states == "bfloat16":
            del values["states"]
        return values

    @classmethod
    def from_json(cls, data: bytes | bytearray, where: str) -> Manifest:
        """Parse a manifest; DataError, with `where` in its message, if it is not one."""
        try:
            values: dict[str, Any] = json.loads(data)
            version = values.get("version")
            if version != VERSION:
                raise DataError(
                    f"{where} has version {version!r}, wanted {VERSION}; extract the features again into a new store"
                )
            if (form := values.get("states", FORMS[0])) not in FORMS:
                raise DataError(f"{where} has states in {form!r}, wanted {' or '.join(FORMS)}; update eagle-plugin")
            return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})
        except RecursionError as error:
            raise DataError(f"{where} {json_fault(error)} to be a manifest; give the store's URL") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{where} is not a manifest of a feature store ({error}); give the store's URL") from error

    def differences(self, other: Manifest) -> list[str]:
        """One text per field that differs, with both values; the name of the target is not compared."""
        return [
            f"{field.name} {getattr(self, field.name)!r}, not {getattr(other, field.name)!r}"
            for field in fields(self)
            if field.name != "target" and getattr(self, field.name) != getattr(other, field.name)
        ]

    def digest(self) -> str:
        """sha256 of all fields but the name of the target."""
        return _sha256(json.dumps(replace(self, target="")._values(), sort_keys=True).encode())

    def check_target(self, folder: str | Path) -> None:
        """Raise DataError unless the target in `folder` is the one whose features these are."""
        found = target_digests(folder)
        wrong = [name for name, digest in found.items() if digest != getattr(self, name)]
        if wrong:
            raise DataError(
                f"the features are of {self.target}, and {folder} is another target "
                f"({', '.join(wrong)} differ); give the target that the features were extracted from"
            )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
