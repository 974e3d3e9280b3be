"""The one description of a draft head, made of its files, that commands, servers and the check before a start read.

It says what is stored, and judges nothing that engines see differently: what SGLang makes of it is in
`heads.checkpoint`, what vLLM makes of it in `heads.vllm_rules`. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_plugin.heads.aux_layers import read_ids
from eagle_plugin.heads.block_config import is_block_drafter
from eagle_plugin.heads.files import (
    DTYPES,
    HeadError,
    StoredTensor,
    by_parameter,
    canonical_name,
    count_layers,
    layer_config,
    read_config,
    read_tensors,
)
from eagle_plugin.heads.head_config import validate_config
from eagle_plugin.heads.kinds import HeadSpec, spec_of_tensors
from eagle_plugin.heads.manifest import read_manifest


@dataclass(frozen=True)
class HeadDescription:
    """What the files of a head hold; config.json has passed `head_config.validate_config`."""

    folder: Path
    written: dict[str, Any]  # config.json as it is stored
    config: dict[str, Any]  # the same with the keys of its layers at the top
    stored: dict[str, StoredTensor]  # by the names in the files
    manifest: dict[str, Any] | None  # eagle_plugin.json

    @cached_property
    def names(self) -> frozenset[str]:
        """The canonical names of all tensors."""
        return frozenset(canonical_name(name) for name in self.stored)

    @cached_property
    def spec(self) -> HeadSpec | None:
        """The kind of the head by its tensors, whatever class config.json names; None where it is no EAGLE head."""
        return None if is_block_drafter(self.written) else spec_of_tensors(self.names)

    @property
    def num_layers(self) -> int:
        """The number of layers whose weights are stored."""
        return count_layers(self.names)

    @property
    def aux_ids(self) -> tuple[list[int] | None, list[int] | None]:
        """The ids of aux layers in eagle_config (SGLang's key) and at the top level (vLLM's).

        Raises:
            HeadError: one of them is not a list of whole numbers.
        """
        return read_ids(self.written, self.folder)

    @property
    def hidden_size_key(self) -> str:
        """The key of config.json that must equal the target's hidden_size."""
        return "target_hidden_size" if self.config.get("target_hidden_size") else "hidden_size"

    @property
    def quantised(self) -> list[str]:
        """The weights, by their names in the files, that are stored in a type of fewer bits than 16."""
        others = ("d2t", "t2d", ".inv_freq")  # no weights
        return [name for name, found in self.stored.items() if found.dtype not in DTYPES and not name.endswith(others)]

    @property
    def leftover_quantisation(self) -> bool:
        """Whether config.json has a `quantization_config` although the weights are plain."""
        return self.written.get("quantization_config") is not None and not self.quantised

    def by_parameter(self, rename: Callable[[str], str] = canonical_name) -> dict[str, StoredTensor]:
        """The tensors by the parameters that an engine's loader puts them in.

        Raises:
            HeadError: two tensors are for one parameter.
        """
        return by_parameter(self.stored, rename)


def read_head(folder: str | Path) -> HeadDescription:
    """Describe the head in a folder, from config.json, the headers of its weights and eagle_plugin.json.

    Raises:
        HeadError: a file is missing, cannot be read, or holds what no engine can read.
    """
    folder = Path(folder)
    written = read_config(folder)
    config = layer_config(written)
    validate_config(config, folder / "config.json")
    return HeadDescription(folder, written, config, read_tensors(folder), read_manifest(folder))


def refuse_block_drafter(head: HeadDescription) -> None:
    """Raise HeadError where a head is a block drafter, to which the rules of EAGLE heads do not apply."""
    if is_block_drafter(head.written):
        raise HeadError(
            f"{head.folder} is a block drafter (DFlash, DSpark), wanted an EAGLE head here: both engines have methods "
            "of their own for it (vLLM dflash or dspark, SGLang DFLASH or DSPARK), and eagle-plugin check says whether "
            "the plugin serves it with trees"
        )


def described_spec(head: HeadDescription) -> HeadSpec:
    """The kind of a head.

    Raises:
        HeadError: its tensors are those of no EAGLE head.
    """
    refuse_block_drafter(head)
    if head.spec is None or "fc.weight" not in head.names:
        raise HeadError(f"{head.folder} has no fc.weight, so it is no EAGLE head; give the folder of a draft head")
    return head.spec
