"""The dashboard and the alerts in a real Prometheus that scrapes a real server: every query returns numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import bigram_models
import debian_prometheus
import httpx
import pytest
from debian_prometheus import ask
from serving import GRAPHS, VLLM_PYTHON, _next_port, serving, tiny_spec, vllm_spec

from eagle_plugin.bench.servers import Server

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy/config"
PROMPTS = ["tree root leaf tree root leaf", "the quick brown fox", "one two three one two three", "x = y"]
# What they ask a server for first, in short. In SGLang the former gets names with colons by relabelling alone.
OF_PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0"
OF_PROMETHEUS_3 = f"{OF_PROMETHEUS_2};escaping=allow-utf-8"
SECONDS = 180  # a busy machine
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return debian_prometheus.programs(tmp_path_factory.mktemp("debian"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A copy of the configuration, to be changed."""
    return Path(shutil.copytree(CONFIG, tmp_path / "config"))


def promtool(programs: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([programs / "promtool", *args], capture_output=True, text=True)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_promtool_finds_nothing_and_each_alert_fires(programs: Path, config: Path) -> None:
    for args in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts-test.yml"]):
        done = promtool(programs, *args[:2], config / args[2])
        assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"alert: (\w+)", (CONFIG / "alerts.yml").read_text("utf-8"))
    assert set(names) == set(re.findall(r"alertname: (\w+)", (CONFIG / "alerts-test.yml").read_text("utf-8")))


@pytest.mark.parametrize(
    ("args", "old", "new"),
    [
        (("check", "rules"), "[10m])) > 0", "[10m]) > 0"),  # a bracket is missing
        (("check", "rules"), "for: 30m", "fro: 30m"),
        (("test", "rules"), ">= 200", ">= 199"),  # fires for the good server too
        (("test", "rules"), "< 0.2", "< 0.05"),  # does not fire
    ],
)
def test_promtool_finds_a_planted_error(
    args: tuple[str, str], old: str, new: str, programs: Path, config: Path
) -> None:
    replace(config / "alerts.yml", old, new)
    file = "alerts.yml" if args[0] == "check" else "alerts-test.yml"
    assert promtool(programs, *args, config / file).returncode != 0


def send_requests(server: Server) -> None:
    """Of the kinds that the dashboard shows: with trees and with penalties, captured and stored ones, dropped ones."""
    body = {"model": httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]}
    body |= {"temperature": 0, "ignore_eos": True}

    def post(prompt: str, tokens: int, headers: Mapping[str, str] = MappingProxyType({}), **more: Any) -> None:
        request = body | {"prompt": prompt, "max_tokens": tokens} | more
        url = f"{server.url}/v1/completions"
        httpx.post(url, json=request, headers=headers, timeout=600, trust_env=False).raise_for_status()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda prompt: post(prompt, 120), PROMPTS))
    post(PROMPTS[0], 40, frequency_penalty=0.5)  # in SGLang the walk of such a step runs without a graph
    post(PROMPTS[1], 24, {"X-Eagle-Capture": "off"})
    for name, tokens in (("stored", 24), ("too-short", 3)):
        post(PROMPTS[2], tokens, eagle_plugin={"features": {"id": f"{name}-{time.time_ns()}"}})


def queries(dashboard: dict[str, Any], model: str) -> set[str]:
    """The queries of the panels for one model, as Grafana sends them."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return {
        query.replace("$model", re.escape(model).replace("\\", "\\\\")).replace("$__rate_interval", "30s")
        for query in found
    }


def is_number(series: dict[str, Any]) -> bool:
    return math.isfinite(float(series["value"][1]))


def has_numbers(url: str, query: str) -> bool:
    return any(is_number(series) for series in ask(url, "query", query=query)["result"])


@pytest.mark.server
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_query_of_the_dashboard_returns_numbers(
    engine: str, programs: Path, config: Path, tmp_path: Path
) -> None:
    pytest.importorskip("sglang")
    if engine == "vllm" and not VLLM_PYTHON.exists():
        pytest.skip("there is no .venv-vllm; make it with `make env-vllm`")
    target = bigram_models.bigram_target(tmp_path / "target", noise=0.02)
    head = bigram_models.bigram_eagle3_head(tmp_path / "head", target, wrong=0.3)
    environment = GRAPHS | {
        "EAGLE_PLUGIN": "1",
        "EAGLE_POLICY": "auto",
        "EAGLE_LOOKUP": "on",
        "EAGLE_CAPTURE": str(tmp_path / "capture"),
        "EAGLE_FEATURES": str(tmp_path / "features"),
    }
    if engine == "vllm":
        own = {"PYTHONPATH": str(ROOT), "EAGLE_CAPTURE_PYTHON": sys.executable}
        spec = vllm_spec(target, head, environment=environment | own)
    else:
        flags = ("--skip-server-warmup", "--enable-metrics")
        spec = tiny_spec(target, head, extra_flags=flags, environment=environment)
    dashboard = json.loads((CONFIG / "eagle-plugin.json").read_text("utf-8"))
    if engine == "vllm":  # SGLang's alone (docs/metrics.md)
        dashboard["panels"] = [panel for panel in dashboard["panels"] if "eager_steps" not in json.dumps(panel)]
    with serving([spec], tmp_path / "logs") as (server,):
        replace(config / "prometheus.yml", "server:30000", f"127.0.0.1:{server.port}")
        replace(config / "prometheus.yml", "15s", "1s")
        with debian_prometheus.running(
            programs / "prometheus", config / "prometheus.yml", tmp_path, _next_port()
        ) as url:
            end, missing = time.monotonic() + SECONDS, {"models"}
            while missing:
                assert time.monotonic() < end, f"no numbers: {sorted(missing)}"
                send_requests(server)
                (variable,) = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
                metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
                if models := ask(url, f"label/{label}/values", **{"match[]": metric}):
                    missing = {query for query in queries(dashboard, models[0]) if not has_numbers(url, query)}
            for accepted, colon in ((OF_PROMETHEUS_2, "_" if engine == "sglang" else ":"), (OF_PROMETHEUS_3, ":")):
                page = httpx.get(f"{server.url}/metrics", headers={"Accept": accepted}, trust_env=False)
                assert f"\neagle_plugin{colon}verify_rounds_total{{" in page.text, "see metric_relabel_configs"
            misspelt = [query.replace("eagle_plugin:", "eagle_plugin:no_") for query in queries(dashboard, models[0])]
            assert not any(has_numbers(url, query) for query in misspelt)
            rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in rules} == {"ok"} and len(rules) > 5
            (serving_rule,) = [rule["query"] for rule in rules if rule["name"] == "EagleNotServing"]
            assert has_numbers(url, serving_rule.partition(" unless ")[0]) and not has_numbers(url, serving_rule)
