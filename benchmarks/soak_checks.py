"""The rules of benchmarks/soak.py: what a server must be like while no request runs, and how that is read."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from benchmarks.soak_requests import probes
from eagle_plugin.bench.load import LoadError, flush_prefix_cache
from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.policy_sources import samples_of
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.servers import Server

MEMORY_SHARE = 0.01  # by which memory may grow from the second check to the last
IDLE_SECONDS = 30.0
REQUEST_SECONDS = 300.0


class Check(Strict):
    """The server after so many requests, while none runs."""

    requests: int
    seconds: float = Field(description="since the start, checks included")
    answered: dict[str, int] = Field(description="requests by what came of them, since the start of this server")
    events: dict[str, int] = Field(default={}, description="by name, while requests ran")
    running: float
    cache_in_use: float = Field(description="SGLang: tokens; vLLM: a share; of an empty prefix cache")
    memory_mib: float
    threads: int
    files: int
    accept_length: float = Field(description="of the probes: tokens per round")
    same_responses: bool
    drafted: float
    accepted: float
    verify_rounds: float
    shape_rounds: float
    faults: list[str]


class Report(Strict):
    """out/soak-ENGINE.json."""

    engine: str
    seed: int
    every: int
    machine: Machine
    checks: list[Check]

    @property
    def faults(self) -> list[str]:
        """Of all checks, the first ones of each kind."""
        return [f"after {check.requests} requests: {fault}" for check in self.checks for fault in check.faults]


def leftovers(running: float, in_use: float, same_responses: bool, answered: Mapping[str, int]) -> list[str]:
    """What a server must not be left with by requests, however few."""
    found = []
    if running:
        found.append(f"{running:g} requests run although every answer has come")
    if in_use:
        found.append(f"{in_use:g} of the cache are in use although nothing runs")
    if not same_responses:
        found.append("the greedy texts of the probes differ from those at the start")
    bad = {key: count for key, count in answered.items() if key not in ("200", "left")}
    if bad:
        found.append(f"requests ended with {bad}")
    return found


def faults_of(check: Check, earlier: Sequence[Check]) -> list[str]:
    """The rules that a check breaks; `earlier` are those of the same server, of which the first is its warm-up."""
    found = leftovers(check.running, check.cache_in_use, check.same_responses, check.answered)
    if check.accepted > check.drafted:
        found.append(f"{check.accepted:g} tokens were accepted of {check.drafted:g} drafted ones")
    if check.verify_rounds > check.shape_rounds:
        found.append(f"{check.verify_rounds:g} rounds verified trees of {check.shape_rounds:g} rounds of all shapes")
    if len(earlier) < 2:
        return found
    first = earlier[1]
    for key in ("threads", "files"):
        if getattr(check, key) > getattr(first, key):
            found.append(f"{getattr(check, key)} {key} are open, {getattr(first, key)} were after the warm-up")
    if check.memory_mib > first.memory_mib * (1 + MEMORY_SHARE):
        found.append(f"memory grew from {first.memory_mib:g} to {check.memory_mib:g} MiB")
    lengths = [one.accept_length for one in earlier]
    spread = 4 * statistics.stdev(lengths) + 0.02  # shapes are drawn at random: the interval of earlier checks
    if check.accept_length < statistics.mean(lengths) - spread:
        found.append(f"the probes' accept length is {check.accept_length}, {statistics.mean(lengths):.3f} before")
    return found


def metric_sum(text: str, name: str) -> float:
    """The sum of an engine's own samples with this name."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def in_use(server: Server, engine: str) -> tuple[float, float]:
    """Requests that run or wait, and what of the cache is in use."""
    if engine == "sglang":
        loads = httpx.get(f"{server.url}/v1/loads", timeout=60, trust_env=False).json()["loads"]
        requests = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        return requests, sum(load["num_used_tokens"] for load in loads)
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    requests = metric_sum(text, "vllm:num_requests_running") + metric_sum(text, "vllm:num_requests_waiting")
    return requests, metric_sum(text, "vllm:kv_cache_usage_perc")


def wait_idle(server: Server, engine: str, seconds: float = IDLE_SECONDS) -> tuple[float, float]:
    """Until no request runs and, without a prefix cache, no token is held; the last values if that never comes."""
    deadline, found = time.monotonic() + seconds, (1.0, 1.0)
    while any(found) and time.monotonic() < deadline:
        with contextlib.suppress(LoadError):  # requests run still
            flush_prefix_cache(server.endpoint)
        found = in_use(server, engine)
        time.sleep(0.0 if not any(found) else 0.5)
    return found


def ask_probes(server: Server) -> list[str]:
    """The texts of the probes, one at a time."""
    with httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS, trust_env=False) as client:
        answers = [client.post("/v1/completions", json=body).raise_for_status().json() for body in probes()]
    return [answer["choices"][0]["text"] for answer in answers]


def plugin_counts(server: Server) -> dict[str, float]:
    """The sums of the plugin's metrics, 0 for one that is not there yet."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    found: dict[str, float] = defaultdict(float)
    for samples in samples_of(text).values():
        for sample in samples:
            found[sample.name] += sample.value
    return found
