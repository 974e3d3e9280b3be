"""What a job will take, from its recipe and config.json alone: rows, bytes, memory and hours, before anything runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from eagle_plugin.collect.settings import FORMS
from eagle_plugin.learning.data.store.extraction import BATCH_TOKENS
from eagle_plugin.learning.data.store.features import check_aux_layers, default_aux_layers
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.sizes import (
    StoreSizes,
    TargetSizes,
    bytes_per_token,
    features_layout,
    sizes_of_average,
    sizes_of_rows,
    target_sizes,
)
from eagle_plugin.learning.jobs.job_file import JobFile
from eagle_plugin.learning.jobs.recipe import JobError
from eagle_plugin.learning.jobs.stages import list_stages
from eagle_plugin.learning.train.recipe import TrainRecipe, parse_recipe
from eagle_plugin.learning.train.sizes import TrainingSizes, training_sizes, unread_head
from eagle_plugin.models import CATALOG, installed, model_folder
from eagle_plugin.models.configs import CONFIGS

PUBLISHED_DIALOGUES = 100_000  # of which published heads have seen at least so many (docs/training.md)
How = Literal["given", "exact", "derived", "rough"]


class Stat(NamedTuple):
    """One line of an estimate."""

    key: str
    text: str
    value: float
    unit: str  # "", "B", "FLOP" or "h"
    how: How


class Asked(NamedTuple):
    """What the options of the command say."""

    dialogues: int | None
    prompt_tokens: int
    answer_tokens: int | None
    rows: Path | None
    tflops: float  # per device
    bandwidth: float  # 10^9 bytes per second and device
    devices: int
    device: str  # "cpu" or "cuda"


@contextmanager
def config_folder(name: str) -> Iterator[Path]:
    """A folder with the config.json of a target: the folder itself, an installed model's, or that of a known name.

    Raises:
        JobError: it is none of these.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        yield folder
    elif name in CATALOG and installed(name):
        yield model_folder(name)
    elif name in CONFIGS:
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
            yield Path(made)
    else:
        raise JobError(
            f"the target {name} is no folder with config.json, and none of {', '.join(CONFIGS)}; give such a folder"
        )


def estimate(job: JobFile, asked: Asked) -> list[Stat]:
    """The stats of a job.

    Raises:
        JobError, TrainError, DataError, HeadError: the recipe is wrong, or does not say how much there is of something.
    """
    if job.head is not None:
        raise JobError("the recipe brings a head and trains none, so there is nothing to estimate; give another recipe")
    with config_folder(job.target) as folder:
        target = target_sizes(folder)
        aux = _aux_layers(job, target)
        layout = features_layout(target.hidden_size, target.num_layers, target.vocab_size, aux, job.states)
        store = _store(job, asked, layout)
        stats = [
            *_data(store, asked),
            *_target(job, target, store, asked),
            *_features(job, target, store, layout, asked),
        ]
        head, processes = None, job.train_processes or asked.devices
        for stage in list_stages(job, folder, Path("out"), minutes=job.train_minutes):
            if not stage.recipe:
                continue
            settings = parse_recipe(yaml.safe_load(stage.recipe), f"the recipe's {stage.name}")
            if head is None:  # later runs train it further
                head = unread_head(settings.head, folder, aux, job.vocabulary)
            sizes = training_sizes(
                settings,
                head,
                target.vocab_size,
                target.dtype_bytes,
                document=store.tokens / max(1, store.documents),
                responses=store.response_tokens / max(1, store.tokens),
                processes=processes,
                device=asked.device,
            )
            theirs = asked._replace(devices=processes)
            stats += _training(stage.name, settings, sizes, store, theirs, target if job.online else None)
    hours = {stat.key: stat.value for stat in stats if stat.unit == "h"}
    training = sum(hours[f"{_key(f'train {name}')}_hours"] for name in job.train)
    total, here = sum(hours.values()), _processes_here(job, asked)
    parts = {
        "hours": ("all of it, hours of one device", total),
        "shared_hours": (f"the same, shared by {asked.devices}", total / asked.devices),
        "job_hours": (f"a job: its training on {here}, all else on one", total - training + training / here),
    }
    return [*stats, *(Stat(key, text, value, "h", "rough") for key, (text, value) in parts.items())]


def _processes_here(job: JobFile, asked: Asked) -> int:
    """Devices on which a job trains: without `train_processes` all GPUs, and one process on a CPU."""
    wanted = asked.devices if asked.device == "cuda" else 1
    return min(job.train_processes or wanted, asked.devices)


def known_targets() -> list[tuple[str, int, int, str, list[float]]]:
    """(name, hidden size, layers, aux layers, bytes of a token in a store of each of `FORMS`) of known targets."""
    found: list[tuple[str, int, int, str, list[float]]] = []
    for name, config in CONFIGS.items():
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        aux = default_aux_layers(layers)
        layouts = [features_layout(hidden, layers, config["vocab_size"], aux, form) for form in FORMS]
        found.append((name, hidden, layers, ",".join(map(str, aux)), list(map(bytes_per_token, layouts))))
    return found


def _aux_layers(job: JobFile, target: TargetSizes) -> tuple[int, ...]:
    if job.aux_layers is not None:
        return check_aux_layers(job.aux_layers, target.num_layers)
    return default_aux_layers(target.num_layers)


def _store(job: JobFile, asked: Asked, layout: Manifest) -> StoreSizes:
    if asked.rows is not None:
        return sizes_of_rows(asked.rows, layout)
    prompts = job.prompts
    limits = [one.limit for one in prompts.sets]
    count = asked.dialogues or (job.traffic.count if job.traffic else None) or prompts.builtin
    if count is None and limits and not prompts.files and None not in limits:
        count = sum(limit for limit in limits if limit is not None)
    if count is None:
        raise JobError("the recipe does not say how many dialogues there are; give their number with --dialogues")
    count += job.recorded.count if job.recorded else 0
    longest = (job.traffic or job.generate).max_tokens
    return sizes_of_average(count, asked.prompt_tokens, asked.answer_tokens or longest, layout)


def _data(store: StoreSizes, asked: Asked) -> list[Stat]:
    counted: How = "given" if asked.rows is None else "exact"
    follows: How = "derived" if asked.rows is None else "exact"
    return [
        Stat("rows", "rows", store.documents, "", counted),
        Stat(
            "published_percent",
            f"percent of the {PUBLISHED_DIALOGUES:,} that published heads have at least",
            100 * store.documents / PUBLISHED_DIALOGUES,
            "",
            follows,
        ),
        Stat("tokens", "tokens", store.tokens, "", follows),
        Stat("response_tokens", "of them the target's answers", store.response_tokens, "", follows),
    ]


def _target(job: JobFile, target: TargetSizes, store: StoreSizes, asked: Asked) -> list[Stat]:
    prompts = store.tokens - store.response_tokens
    rows = max(1, store.documents)
    answers = job.traffic or job.generate
    clients = min(answers.concurrency, rows)
    cache = clients * (prompts / rows + answers.max_tokens) * target.cache_bytes
    flops = target.forward_flops(store.tokens, store.tokens / rows / 2) + target.readout_flops(store.response_tokens)
    # Each round of all clients reads the weights once, and each token the keys and values before it.
    context = (prompts + store.response_tokens / 2) / rows
    read = store.response_tokens * (target.weight_bytes / clients + context * target.cache_bytes)
    return [
        Stat("target_parameters", "parameters of the target", target.parameters, "", "exact"),
        Stat("target_bytes", "its weights", target.weight_bytes, "B", "derived"),
        Stat("cache_bytes", f"KV cache of {clients} requests at a time", cache, "B", "derived"),
        Stat(
            "serving_bytes",
            f"memory per device of a server on {asked.devices}, without the engine's own",
            (target.weight_bytes + cache) / asked.devices,
            "B",
            "rough",
        ),
        Stat("generate_flops", "arithmetic of the answers", flops, "FLOP", "derived"),
        Stat("generate_bytes", "weights and caches that they read", read, "B", "derived"),
        Stat("generate_hours", "answers, hours of one device", _hours(flops, read, asked), "h", "rough"),
    ]


def _features(job: JobFile, target: TargetSizes, store: StoreSizes, layout: Manifest, asked: Asked) -> list[Stat]:
    if job.online is not None:  # one prefill per token that a run trains on
        return [Stat("token_bytes", "bytes per token of hidden states", bytes_per_token(layout), "", "exact")]
    stored = [
        Stat("token_bytes", "bytes per token in the store", bytes_per_token(layout), "", "exact"),
        Stat("store_bytes", "feature store", store.size, "B", "derived" if asked.rows is None else "exact"),
    ]
    if job.traffic is not None:  # the server that answers stores them
        return stored
    flops = target.forward_flops(store.tokens, store.tokens / max(1, store.documents) / 2)
    states = (len(layout.aux_layers) + 1) * target.hidden_size * target.dtype_bytes
    # The states of a batch, and as much again for the layer that runs.
    memory = target.parameters * target.dtype_bytes + 2 * BATCH_TOKENS * states
    return [
        *stored,
        Stat("features_bytes", "memory of a process of `data features`", memory, "B", "rough"),
        Stat("features_flops", "arithmetic of the features", flops, "FLOP", "derived"),
        Stat("features_hours", "features, hours of one device", _hours(flops, 0, asked), "h", "rough"),
    ]


def _training(
    name: str, settings: TrainRecipe, sizes: TrainingSizes, store: StoreSizes, asked: Asked, online: TargetSizes | None
) -> list[Stat]:
    """online: the target, where servers compute the states of each document that is trained on."""
    budget, batch = settings.budget, sum(p.share * (p.batch_tokens or settings.batch_tokens) for p in settings.phases)
    tokens = budget.tokens or (budget.epochs or 0) * store.tokens or (budget.updates or 0) * batch
    hours = tokens * sizes.flops_per_token / (asked.tflops * 1e12) / 3600
    if budget.minutes is not None:
        hours = budget.minutes / 60 * asked.devices
        tokens = hours * 3600 * asked.tflops * 1e12 / sizes.flops_per_token
    key = _key(name)
    given: How = "rough" if budget.minutes is not None else "derived"
    states = []
    if online is not None:
        flops = online.forward_flops(tokens, store.tokens / max(1, store.documents) / 2)
        states = [
            Stat(f"{key}_states_flops", f"{name}: arithmetic of its states", flops, "FLOP", "derived"),
            Stat(f"{key}_states_hours", f"{name}: states, hours of one device", _hours(flops, 0, asked), "h", "rough"),
        ]
    return [
        Stat(f"{key}_parameters", f"{name}: trained parameters", sizes.parameters, "", "exact"),
        Stat(f"{key}_checkpoint_bytes", f"{name}: its two checkpoints", sizes.checkpoint_bytes, "B", "derived"),
        Stat(f"{key}_state_bytes", f"{name}: parameters, gradients, optimiser", sizes.state_bytes, "B", "exact"),
        Stat(f"{key}_frozen_bytes", f"{name}: embedding and the target's lm_head", sizes.frozen_bytes, "B", "derived"),
        Stat(f"{key}_work_bytes", f"{name}: activations and loss", sizes.work_bytes, "B", "rough"),
        Stat(f"{key}_bytes", f"{name}: memory per process", sizes.memory, "B", "rough"),
        Stat(f"{key}_tokens", f"{name}: tokens", tokens, "", given),
        Stat(f"{key}_updates", f"{name}: updates", tokens / batch, "", given),
        Stat(f"{key}_flops", f"{name}: arithmetic", tokens * sizes.flops_per_token, "FLOP", "rough"),
        Stat(f"{key}_hours", f"{name}, hours of one device", hours, "h", "rough"),
        *states,
    ]


def _key(stage: str) -> str:
    return stage.replace(" ", "_")


def _hours(flops: float, read: float, asked: Asked) -> float:
    """Of one device: as long as the arithmetic, or the reading of memory, takes."""
    return max(flops / (asked.tflops * 1e12), read / (asked.bandwidth * 1e9)) / 3600
