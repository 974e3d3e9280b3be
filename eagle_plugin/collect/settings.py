"""Where the states of requests are written, from the environment of the server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from eagle_plugin.collect.readout import readout_scale
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.host_memory import memory_bytes
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.traffic.served import ServedTarget

STORE = "EAGLE_FEATURES"
# Of an answer whose states are stored: "on"; and how many bytes of documents may wait for the writer: a client asks for
# no more at a time.
COLLECTS_HEADER, QUEUE_HEADER = "x-eagle-features", "x-eagle-features-queue"
StatesForm = Literal["bfloat16", "float8"]  # of stored states: float8 has a scale per token and layer
LEAST_QUEUE_MIB, MOST_QUEUE_MIB, QUEUE_SHARE = 1024, 16 * 1024, 32  # of the memory: the 32nd part, within these
FORMS: tuple[StatesForm, ...] = get_args(StatesForm)


class CollectError(UserError):
    """A setting that cannot be used, a store that is another one's, or a writer that cannot start."""


@dataclass(frozen=True)
class StatesFacts:
    """What the manifest of a store says of the states, as the engine that computes them knows it."""

    served: ServedTarget
    aux_layers: tuple[int, ...]  # layers whose input is stored; empty: the last states alone
    dtype: str  # in which the target computes
    hidden_size: int
    num_layers: int
    vocab_size: int
    logit_factor: float = 1.0  # as of `readout.readout_scale`
    softcap: float | None = None

    @classmethod
    def of(cls, served: ServedTarget, aux_layers: tuple[int, ...], dtype: str, config: Any) -> StatesFacts:
        """By the configuration of a text model, as transformers reads it."""
        sizes = int(config.hidden_size), int(config.num_hidden_layers), int(config.vocab_size)
        return cls(served, aux_layers, dtype, *sizes, *readout_scale(config))


@dataclass(frozen=True)
class CollectSettings:
    """The store, and the limits of what goes there."""

    url: str
    max_length: int = 2048  # tokens of a document; longer ones are cut on the right
    shard_mib: int = 256  # of one file of the store
    queue_mib: int = LEAST_QUEUE_MIB  # of documents that wait for the writer, and of those that are not finished
    states: StatesForm = "bfloat16"
    python: str | None = None  # interpreter of the writer process; None: that of the server
    facts: StatesFacts | None = None  # not a setting: the engine's adapter tells it

    def with_facts(self, facts: StatesFacts) -> CollectSettings:
        """The same for one server."""
        return replace(self, facts=facts)

    @property
    def queue_bytes(self) -> int:
        """The same in bytes."""
        return self.queue_mib << 20

    @property
    def shown(self) -> str:
        """The URL as it may be shown."""
        return without_credentials(self.url)

    def to_json(self) -> str:
        """The settings for the writer process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CollectSettings:
        """What `to_json` wrote."""
        values = json.loads(text)
        if facts := values.pop("facts", None):
            served, layers = ServedTarget(**facts.pop("served")), tuple(facts.pop("aux_layers"))
            facts = StatesFacts(served, layers, **facts)
        return cls(**values, facts=facts)


_NUMBERS = {
    "EAGLE_FEATURES_MAX_LENGTH": "max_length",
    "EAGLE_FEATURES_SHARD_MIB": "shard_mib",
    "EAGLE_FEATURES_QUEUE_MIB": "queue_mib",
}
_PYTHON, _STATES = "EAGLE_FEATURES_PYTHON", "EAGLE_FEATURES_STATES"


def collect_settings(environment: Mapping[str, str] = os.environ) -> CollectSettings | None:
    """The settings in the environment; None where nothing is collected.

    Raises:
        CollectError: naming the variable, what it holds and what is wanted.
    """
    names = [*_NUMBERS, _STATES, _PYTHON]
    unknown = sorted(name for name in environment if name.startswith(f"{STORE}_") and name not in names)
    if unknown:
        raise CollectError(f"{unknown[0]} is not a setting of {STORE}, wanted one of {', '.join(names)}; unset it")
    url = environment.get(STORE, "")
    if not url:
        return None
    if "://" not in url and not os.path.isabs(url):
        raise CollectError(f"{STORE} is {url}, wanted a URL or a folder from the root on: {os.path.abspath(url)}")
    given: dict[str, Any] = {
        field: _number(name, text) for name, field in _NUMBERS.items() if (text := environment.get(name))
    }
    if form := environment.get(_STATES):
        if form not in FORMS:
            raise CollectError(f"{_STATES} is {form}, wanted {' or '.join(FORMS)}")
        given["states"] = form
    given.setdefault("queue_mib", default_queue_mib(memory_bytes()))
    return CollectSettings(url, **given, python=environment.get(_PYTHON) or None)


def default_queue_mib(memory: int) -> int:
    """The queue of a server on a machine with so many bytes of memory."""
    return min(max(memory // QUEUE_SHARE >> 20, LEAST_QUEUE_MIB), MOST_QUEUE_MIB)


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise CollectError(f"{name} is {text}, wanted a whole number above 0")
    return int(text)
