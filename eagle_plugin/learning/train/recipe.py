"""The recipe of a training run: every key with its range, read from YAML and from `--set a.b=c`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eagle_plugin.common.devices import fast_dtype
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.recipes import override_key, read_yaml, validate
from eagle_plugin.heads.kinds import BLOCK_DRAFTERS, all_kinds
from eagle_plugin.heads.new_config import Norms

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]


def _expand(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) else value


def _check_kind(value: str) -> str:
    *others, last = ["auto", *sorted(all_kinds())]
    if value not in (*others, last):
        raise ValueError(f"Input should be {', '.join(map(repr, others))} or {last!r}")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_store(value: str) -> str:
    if "://" not in value and not Path(value).is_absolute():
        raise ValueError("wanted a URL or a folder from the root on: EAGLE_FEATURES of the servers")
    return value


LM_HEAD_SHARE = 0.2  # of the learning rate, for the lm_head of a head that is trained further
UserPath = Annotated[Path, BeforeValidator(_expand)]


class TrainError(UserError):
    """A recipe, store, checkpoint or machine that a training run cannot use."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class HeadSettings(_Section):
    """Which head is trained: a new one of a given shape, or an existing one (`from`)."""

    kind: Annotated[str, AfterValidator(_check_kind)] = "auto"
    start: UserPath | None = Field(None, alias="from")
    layers: Positive | None = None
    intermediate_size: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    norms: Norms | None = None
    init: Literal["target", "random"] | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None  # P-EAGLE and block drafters
    block_size: Annotated[int, Field(ge=2, le=17)] | None = None  # block drafters; default: the most steps and one
    causal: bool | None = None  # block drafters: whether a row sees only the rows of the block up to its own
    window: Positive | None = None  # keys that a row of the head sees; default: all, or those of `from`
    vocabulary: UserPath | None = None  # of `data vocabulary`; default: all tokens, or those of `from`

    @model_validator(mode="after")
    def _check(self) -> HeadSettings:
        if self.start is not None:
            # A head of another kind may start from it, with what only that kind has.
            free = {"kind", "layers", "mask_token_id"} if self.kind != "auto" else set()
            fixed = sorted(self.model_fields_set - {"start", "vocabulary", "window"} - free)
            if fixed:
                raise ValueError(f"an existing head (`from`) has its own {', '.join(fixed)}; leave these keys out")
        unread = self.model_fields_set & ({"norms", "window"} if self.drafts_blocks else {"block_size", "causal"})
        if unread and self.kind != "auto":
            raise ValueError(
                f"a head of kind {self.kind} has no {' and no '.join(sorted(unread))}; leave these keys out"
            )
        return self

    @property
    def drafts_blocks(self) -> bool:
        """Whether the recipe names a kind of block drafters."""
        return self.kind in BLOCK_DRAFTERS

    def shape(self) -> dict[str, Any]:
        """The options of a new head that the recipe sets; the rest has the defaults of `new_head`."""
        values = self.model_dump(exclude={"kind", "start", "vocabulary"})
        return {key: value for key, value in values.items() if value is not None}


class StoreSettings(_Section):
    """One feature store of a mix; each epoch takes `weight` times its documents."""

    url: str
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0


class OnlineSettings(_Section):
    """Servers with `EAGLE_FEATURES` that compute the hidden states of rows while training."""

    servers: Annotated[list[str], Field(min_length=1), BeforeValidator(_as_list)]
    store: Annotated[str, AfterValidator(_check_store)]  # their EAGLE_FEATURES; what was read is removed from it
    ahead: Annotated[int, Field(ge=1, le=64)] = 4  # updates that are asked for in advance
    concurrency: Positive = 64  # requests at a time, of each process to each server


class DataSettings(_Section):
    """Where features come from: stores made beforehand, or token rows whose states are computed while training."""

    store: list[StoreSettings] = []
    cache: UserPath | None = None  # local folder that keeps what was read of remote stores
    cache_gib: Annotated[float, Field(gt=0)] = 64  # of that folder, at most
    rows: list[UserPath] = []
    online: OnlineSettings | None = None  # rows only: who computes; default: every process loads the target
    aux_layers: list[Annotated[int, Field(ge=0)]] | None = None  # rows only: a store, or a server, knows its own
    max_length: Positive = 4096  # rows only: tokens of one document; a store, or a server, knows its own

    @model_validator(mode="before")
    @classmethod
    def _accept_single(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            store, rows = values.get("store"), values.get("rows")
            if isinstance(store, str | dict):
                store = [store]
            if isinstance(store, list):
                values["store"] = [{"url": part} if isinstance(part, str) else part for part in store]
            if isinstance(rows, str):
                values["rows"] = [rows]
        return values

    @model_validator(mode="after")
    def _check(self) -> DataSettings:
        if bool(self.store) == bool(self.rows):
            found = "both" if self.store else "neither"
            raise ValueError(f"wanted store or rows, found {found}; name one")
        if self.store and self.online:
            raise ValueError("online is for rows, whose states servers compute; leave it out, or name rows, not store")
        chosen = self.aux_layers is not None or "max_length" in self.model_fields_set
        if chosen and (self.store or self.online):
            when = "the store was made" if self.store else "the servers were started"
            raise ValueError(f"aux_layers and max_length were fixed when {when}; leave them out")
        return self


class OptimiserSettings(_Section):
    """AdamW, or Muon for the matrices inside the head with AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: Rate = 1e-4
    lm_head_lr: Rate | None = None  # default: see `TrainRecipe.lm_head_lr`
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 0.5  # of the gradient's global norm
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    warm_up: Annotated[float, Field(ge=0, lt=1)] = 0.015  # share of the budget


class PhaseSettings(_Section):
    """A part of the run with its own number of draft steps, batch and learning rate."""

    share: Share = 1.0  # of the budget
    steps: Annotated[int, Field(ge=1, le=16)] = 4
    batch_tokens: Positive | None = None  # default: the recipe's
    lr: Rate | None = None  # peak; default: the optimiser's


class LossSettings(_Section):
    """What is minimised; see docs/training.md for the formulas."""

    name: Literal["ce", "lk"] = "ce"
    decay: Share | None = None  # weight of step k is decay**k; default: as the method of the kind says
    teacher: Literal["full", "draft"] = "full"
    oov: Literal["mass", "drop"] = "mass"
    top_k: Annotated[int, Field(ge=0)] = 0
    columns: Annotated[int, Field(ge=0)] = 0
    train_lm_head: bool = True
    regression: Annotated[float, Field(ge=0)] = 1.0
    classification: Annotated[float, Field(ge=0)] = 0.1
    noise: Annotated[float, Field(ge=0, le=1)] = 0.2
    keep_rate: Share = 0.7
    keep_floor: Share = 0.2
    anchors: Annotated[int, Field(ge=0)] = 512  # block drafters: most blocks of a document; 0: no limit
    segment_rows: Positive = 2048  # P-EAGLE and block drafters: memory, not results
    prompt_weight: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> LossSettings:
        if self.oov == "drop" and self.teacher != "full":
            raise ValueError("oov drop needs teacher full, which knows what is outside the draft vocabulary")
        return self


class BudgetSettings(_Section):
    """How long to train; one key."""

    tokens: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    updates: Annotated[int, Field(ge=0)] | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> BudgetSettings:
        given = [name for name in BudgetSettings.model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"wanted one of tokens, epochs, updates, minutes, found {found}")
        return self


class TrainRecipe(_Section):
    """A whole recipe."""

    target: UserPath
    head: HeadSettings = Field(default_factory=lambda: HeadSettings.model_validate({}))
    data: DataSettings
    optimiser: OptimiserSettings = OptimiserSettings()
    phases: list[PhaseSettings] = Field([PhaseSettings()], min_length=1)
    loss: LossSettings = LossSettings()
    budget: BudgetSettings
    batch_tokens: Positive = 4096  # of all ranks together
    micro_tokens: Positive | None = None  # most tokens of one forward; default: see `forward_limit`
    eval_every: Positive = 200  # updates
    eval_tokens: Annotated[int, Field(ge=0)] = 20_000
    checkpoint_every: Positive = 200  # updates
    log_every: Positive = 10  # updates
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    threads: Positive | None = None  # default: all cores
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; without the key: what is fast, see below
    parallel: Literal["ddp", "fsdp"] = "ddp"  # under torchrun

    @model_validator(mode="after")
    def _check(self) -> TrainRecipe:
        total = sum(phase.share for phase in self.phases)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of the phases sum to {total:g}, wanted 1")
        if "dtype" not in self.model_fields_set:
            object.__setattr__(self, "dtype", fast_dtype(None if self.device == "auto" else self.device))
        return self

    @property
    def lm_head_lr(self) -> float:
        """Peak learning rate of lm_head: a fifth of the others' where it comes from a trained head."""
        options = self.optimiser
        return options.lm_head_lr or options.lr * (1 if self.head.start is None else LM_HEAD_SHARE)

    @property
    def depths(self) -> int:
        """The most draft steps of any phase."""
        return max(phase.steps for phase in self.phases)


# What a resumed run may change: none of these keys changes the weights, but for what `micro_tokens` rounds and draws;
# a run whose memory ran out must be able to lower it.
FREE_ON_RESUME = (
    *("threads", "micro_tokens", "eval_every", "eval_tokens", "checkpoint_every", "log_every"),
    *("data.cache", "data.cache_gib"),
    *(f"data.online.{name}" for name in OnlineSettings.model_fields),
)


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """Read a YAML recipe; each override is `a.b=value`, the value in YAML.

    Raises:
        TrainError: naming every wrong key with its value and what was wanted.
    """
    path = Path(path)
    values = read_yaml(path, TrainError)
    for override in overrides:
        override_key(values, override, TrainError)
    return parse_recipe(values, str(path))


def parse_recipe(values: dict[str, Any], where: str) -> TrainRecipe:
    """Check a recipe that is a mapping already; `where` names it in errors.

    Raises:
        TrainError: naming every wrong key with its value and what was wanted.
    """
    return validate(TrainRecipe, values, where, TrainError)


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in which two dumped recipes differ, without those that a resumed run may change."""
    keys: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if f"{prefix}{name}" in FREE_ON_RESUME or before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            keys += changed_keys(before, after, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name} ({before!r} -> {after!r})")
    return keys
