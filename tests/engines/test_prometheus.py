"""The dashboard and the alerts in a real Prometheus that scrapes a real server: every query returns numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import bigram_models
import debian_prometheus
import httpx
import pytest
from debian_prometheus import ask
from serving import GRAPHS, _next_port, generate, generate_all, serving, tiny_spec

from eagle_plugin.bench.servers import Server

CONFIG = Path(__file__).resolve().parents[2] / "deploy/config"
PROMPTS = ["tree root leaf tree root leaf", "the quick brown fox", "one two three one two three", "x = y"]
# What they ask a server for first, in short; both get the names with colons, the former by relabelling.
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
    generate_all(server, PROMPTS, 120, at_once=2)
    generate(server, PROMPTS[0], 40, frequency_penalty=0.5)  # the walk of such a step runs without a graph
    body = {"model": "m", "temperature": 0, "ignore_eos": True, "messages": [{"role": "user", "content": "a tree"}]}
    for tokens, more, headers in (
        (24, {}, {"X-Eagle-Capture": "off"}),
        (24, {"eagle_plugin": {"features": {"id": f"a-{time.time_ns()}"}}}, {}),
        (3, {"eagle_plugin": {"features": {"id": f"too-short-{time.time_ns()}"}}}, {}),
    ):
        url = f"{server.url}/v1/chat/completions"
        answer = httpx.post(
            url, json=body | more | {"max_tokens": tokens}, headers=headers, timeout=600, trust_env=False
        )
        answer.raise_for_status()


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
def test_every_query_of_the_dashboard_returns_numbers(programs: Path, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    target = bigram_models.bigram_target(tmp_path / "target", noise=0.02)
    head = bigram_models.bigram_eagle3_head(tmp_path / "head", target, wrong=0.3)
    environment = GRAPHS | {
        "EAGLE_POLICY": "auto",
        "EAGLE_LOOKUP": "on",
        "EAGLE_CAPTURE": str(tmp_path / "capture"),
        "EAGLE_FEATURES": str(tmp_path / "features"),
    }
    flags = ("--skip-server-warmup", "--enable-metrics")
    spec = tiny_spec(target, head, extra_flags=flags, environment=environment)
    dashboard = json.loads((CONFIG / "eagle-plugin.json").read_text("utf-8"))
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
            for accepted, colon in ((OF_PROMETHEUS_2, "_"), (OF_PROMETHEUS_3, ":")):
                page = httpx.get(f"{server.url}/metrics", headers={"Accept": accepted}, trust_env=False)
                assert f"\neagle_plugin{colon}verify_rounds_total{{" in page.text, "see metric_relabel_configs"
            misspelt = [query.replace("eagle_plugin:", "eagle_plugin:no_") for query in queries(dashboard, models[0])]
            assert not any(has_numbers(url, query) for query in misspelt)
            rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in rules} == {"ok"} and len(rules) > 5
            (serving_rule,) = [rule["query"] for rule in rules if rule["name"] == "EagleNotServing"]
            assert has_numbers(url, serving_rule.partition(" unless ")[0]) and not has_numbers(url, serving_rule)
