"""Says what of a model the self-test depends on, and how much of it is tried on which device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import MAX_WIDTH, Shape

DTYPES = ("bfloat16", "float16", "float32")
CACHES = ("auto", "float8_e4m3fn", "float8_e5m2")  # the model's own dtype, or one of 8-bit floats with scales


class ModelShapeError(UserError):
    """A model shape that a user wrote wrongly."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a target on one rank, of its head's vocabulary, and of its trees. The default is Llama-3.1-8B's."""

    heads: int = 32  # query heads
    kv_heads: int = 8
    head_dim: int = 128
    latent: int = 0  # of latent attention (MLA): so many first numbers of a key are its value; 0 is off
    dtype: str = "bfloat16"
    kv_cache: str = "auto"
    vocabulary: int = 128256
    draft_vocabulary: int = 32000
    window: int = -1  # of sliding-window attention; -1 is off
    chunk: int = 0  # tokens of an attention chunk; 0 is off
    logit_cap: float = 0.0  # of the attention's logits; 0 is off
    steps: int = 6  # of the draft trees, as are topk and width
    topk: int = 8
    width: int = 48

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "vocabulary", "draft_vocabulary", "steps", "topk"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("chunk", self.chunk >= 0, "at least 0")
        self._require("latent", 0 <= self.latent <= self.head_dim, f"0 to head_dim, which is {self.head_dim}")
        self._require("heads", self.heads % self.kv_heads == 0, f"a multiple of kv_heads, which is {self.kv_heads}")
        self._require("dtype", self.dtype in DTYPES, " or ".join(DTYPES))
        self._require("kv_cache", self.kv_cache in CACHES, " or ".join(CACHES))
        self._require("width", 2 <= self.width <= MAX_WIDTH, f"2 to {MAX_WIDTH}: ancestors have 64 bits")
        self._require("topk", self.topk <= min(self.draft_vocabulary, 128), "at most 128 and the draft vocabulary")
        slots = Shape(self.steps, self.topk, self.width).draft_slots
        self._require("steps", slots <= MAX_WIDTH, f"(steps - 1) * topk at most {MAX_WIDTH}, and not {slots}")

    @property
    def tree(self) -> Shape:
        """The caps of the draft trees."""
        return Shape(self.steps, self.topk, self.width)

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.latent or self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of keys, values and hidden states."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def float8(self) -> torch.dtype | None:
        """Of what the cache holds; None where that is keys and values as they are."""
        return None if self.kv_cache == "auto" else getattr(torch, self.kv_cache)

    @classmethod
    def parse(cls, text: str) -> ModelShape:
        """The default shape with what `text` changes of it, written "heads=16,head_dim=64".

        Raises:
            ModelShapeError: a name or a value is wrong.
        """
        defaults, changes = cls(), {}
        known = {field.name: type(getattr(defaults, field.name)) for field in fields(cls)}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            name = name.strip().replace("-", "_")
            if name not in known:
                raise ModelShapeError(
                    f"--model-shape has {part!r}, wanted NAME=VALUE with a name of {', '.join(known)}"
                )
            try:
                changes[name] = known[name](value.strip())
            except ValueError as error:
                raise ModelShapeError(
                    f"--model-shape {name} is {value!r}, wanted a number, such as {name}=8"
                ) from error
        return replace(defaults, **changes)

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ModelShapeError(f"--model-shape {name} is {getattr(self, name)}, wanted {wanted}")


class Sizes(NamedTuple):
    """How much is tried; the more the slower."""

    batch: int
    prefix: int  # the most keys of a request before its tree
    table: int  # columns of the slot table
    # Both of a table too narrow to split a prefix over programs, as in full batches of short requests; None: no kernel
    # splits.
    narrow: tuple[int, int] | None
    # Requests whose trees are walked over; on a GPU whose rows of logits are divided among blocks, and whose are not.
    walked: tuple[int, ...]
    vocabulary: int  # the most of both vocabularies
    replays: int  # of the captured toy round


def sizes_for(device: torch.device | str, model: ModelShape) -> Sizes:
    """On a GPU the model's own sizes and long contexts; on a CPU what ends in seconds."""
    if torch.device(device).type == "cuda":
        full = torch.cuda.get_device_properties(device).multi_processor_count // model.width
        walked = max(min(full, 4), 1), full + 1
        return Sizes(4, 3000, 4096, narrow=(150, 250), walked=walked, vocabulary=model.vocabulary, replays=12)
    return Sizes(2, 150, 256, narrow=None, walked=(2,), vocabulary=32768, replays=6)


def as_text(model: ModelShape) -> dict[str, Any]:
    """The shape as a record names it."""
    return {field.name: getattr(model, field.name) for field in fields(model)}
