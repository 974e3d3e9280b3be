"""What a new head copies from its target's checkpoint: sizes, embedding, lm_head, final norm and last layer."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from eagle_plugin.heads.files import DTYPES, HeadError, read_tensors, text_config
from eagle_plugin.heads.target_config import read_target_config

EMBEDDING = "embed_tokens.weight"


class TargetShape:
    """What config.json of a target says.

    Raises:
        HeadError: the folder has no config.json, or it lacks a size.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        raw = read_target_config(self.folder)
        self.config = text_config(raw)  # of the language model inside a multimodal one
        self.architecture: str = (raw.get("architectures") or ["?"])[0]
        self.hidden_size: int = self.config["hidden_size"]
        self.vocab_size: int = self.config["vocab_size"]
        self.num_layers: int = self.config["num_hidden_layers"]


class TargetFiles(TargetShape):
    """The configuration and single tensors of a target, read without building the model.

    Raises:
        HeadError: the folder has no config.json or no safetensors, lacks a size, or has no plain embedding.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._tensors = read_tensors(self.folder)
        self._prefix = self._find_embedding().removesuffix(EMBEDDING)

    def _find_embedding(self) -> str:
        shape = (self.vocab_size, self.hidden_size)
        found = [
            name
            for name, tensor in self._tensors.items()
            if name.endswith(EMBEDDING) and tensor.shape == shape and tensor.dtype in DTYPES
        ]
        if len(found) != 1:
            raise HeadError(
                f"{self.folder} has {len(found)} unquantised tensors *{EMBEDDING} of shape {list(shape)}, wanted one; "
                "give the target as transformers saves it"
            )
        return found[0]

    def embedding(self) -> Tensor:
        """[V, H] in the dtype of the checkpoint."""
        return self._read(self._prefix + EMBEDDING)

    def lm_head(self) -> Tensor:
        """[V, H] in the dtype of the checkpoint; the embedding where the two are tied.

        Raises:
            HeadError: it is quantised.
        """
        names = [name for name in self._tensors if name.endswith("lm_head.weight")]
        tied = bool(self.config.get("tie_word_embeddings"))
        packed = [name for name in self._tensors if "lm_head." in name and not name.endswith(".bias")]
        if not names and not tied and packed:
            raise HeadError(
                f"{self.folder} has {packed[0]}, wanted lm_head.weight; give the target with an unquantised lm_head"
            )
        if not names or tied:
            return self.embedding()
        if self._tensors[names[0]].dtype not in DTYPES:
            raise HeadError(
                f"{self.folder} has {names[0]} as {self._tensors[names[0]].dtype}, wanted one of {', '.join(DTYPES)}; "
                "give the target with an unquantised lm_head"
            )
        return self._read(names[0])

    def matrix(self, name: str) -> Tensor | None:
        """A parameter by its name after the prefix of the decoder ("layers.3.mlp.up_proj.weight"); None where the
        checkpoint does not have it or has it quantised."""
        stored = self._tensors.get(self._prefix + name)
        return self._read(stored.name) if stored is not None and stored.dtype in DTYPES else None

    def gain(self, *names: str) -> Tensor | None:
        """The factor [H] of the first norm of these that exists, with the 1 that some models add to the weight."""
        for name in names:
            weight = self.matrix(name)
            if weight is not None:
                return weight.float() + adds_one(str(self.config.get("model_type")), name.split(".")[-2])
        return None

    def _read(self, name: str) -> Tensor:
        with safe_open(str(self._tensors[name].file), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def adds_one(model_type: str, norm: str) -> bool:
    """Whether norms of this name multiply by 1 + weight in targets of this type, which a head's plain norms do not.

    Read from the source of the installed transformers; False for a type that it does not have.
    """
    source = _modeling_source(model_type)
    kinds = set(re.findall(rf"self\.{norm} = (\w+)\(", source))
    bodies = [part for part in re.split(r"^(?=class )", source, flags=re.MULTILINE) if part[6:].split("(")[0] in kinds]
    return any(re.search(r"\(1(\.0)? \+ self\.weight", body) for body in bodies)


@functools.cache
def _modeling_source(model_type: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    spec = importlib.util.find_spec(f"transformers.models.{name}") if name.isidentifier() else None
    folders = [] if spec is None else spec.submodule_search_locations or []
    return "".join(path.read_text() for folder in folders for path in sorted(Path(folder).glob("modeling_*.py")))
