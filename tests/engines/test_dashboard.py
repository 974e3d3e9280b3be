"""The dashboard for Grafana, the alerts, the exported metrics and docs/metrics.md name the same metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client import REGISTRY

from eagle_plugin.collect.metrics import FeatureMetrics
from eagle_plugin.common.metric_registry import PREFIX, forget
from eagle_plugin.policy.metrics import PolicyMetrics
from eagle_plugin.runtime.round_metrics import RoundMetrics
from eagle_plugin.traffic.metrics import CaptureMetrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/config/eagle-plugin.json"
NAME = re.compile(rf"{PREFIX}(\w+)")
COLUMNS = 24  # of Grafana's grid

# What Grafana 10 and later read of a dashboard, as far as this one uses it; other fields are refused.
DATASOURCE = {"const": {"type": "prometheus", "uid": "${datasource}"}}
NUMBER = {"type": "integer", "minimum": 0}
GRID = {
    "type": "object",
    "properties": {
        "x": {**NUMBER, "maximum": COLUMNS - 1},
        "y": NUMBER,
        "w": {**NUMBER, "maximum": COLUMNS},
        "h": NUMBER,
    },
    "required": ["x", "y", "w", "h"],
    "additionalProperties": False,
}
TARGET = {
    "type": "object",
    "properties": {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "datasource": DATASOURCE,
        "expr": {"type": "string", "pattern": PREFIX},
        "legendFormat": {"type": "string", "minLength": 1},
        "format": {"enum": ["time_series", "table", "heatmap"]},
    },
    "required": ["refId", "datasource", "expr", "legendFormat"],
    "additionalProperties": False,
}
PANEL = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "state-timeline", "heatmap"]},
        "title": {"type": "string", "minLength": 1},
        "description": {"type": "string", "minLength": 1},
        "datasource": DATASOURCE,
        "gridPos": GRID,
        "targets": {"type": "array", "items": TARGET, "minItems": 1},
        "fieldConfig": {
            "type": "object",
            "properties": {
                "defaults": {"type": "object", "properties": {"unit": {"enum": ["short", "percentunit", "s"]}}},
                "overrides": {"type": "array"},
            },
            "required": ["defaults", "overrides"],
            "additionalProperties": False,
        },
        "options": {"type": "object"},
    },
    "required": ["id", "type", "title", "description", "datasource", "gridPos", "targets", "fieldConfig", "options"],
    "additionalProperties": False,
}
ROW = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "row"},
        "title": {"type": "string"},
        "collapsed": {"const": False},
        "gridPos": GRID,
        "panels": {"const": []},
    },
    "required": ["id", "type", "title", "collapsed", "gridPos", "panels"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "items": {"oneOf": [ROW, PANEL]}},
        "templating": {"type": "object", "required": ["list"]},
        "time": {"type": "object", "required": ["from", "to"]},
    },
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time"],
}


@pytest.fixture
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text("utf-8"))


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


@contextmanager
def captures() -> Iterator[None]:
    """While the metrics of a capture and of a collection are registered."""
    made = [*CaptureMetrics("m").made, *FeatureMetrics("m").made]
    yield
    for metric in made:
        REGISTRY.unregister(metric)


def exported() -> set[str]:
    """The sample names of everything that the plugin exports, with one name per histogram."""
    RoundMetrics(["model_name"], 2).labelled("m")
    PolicyMetrics({"model_name": "m"})
    with captures():
        families = [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]
    forget()
    return {family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "") for family in families}


def family_names(text: str) -> Iterator[str]:
    for name in NAME.findall(text):
        yield re.sub(r"_(bucket|count|sum)$", "", name)


def test_grafana_reads_it(dashboard: dict[str, Any]) -> None:
    jsonschema.validate(dashboard, SCHEMA)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs), panel["title"]
    assert "id" not in dashboard  # Grafana gives the number
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text("utf-8")))
    assert used == names | {"__rate_interval"}


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= COLUMNS for place in places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)


def test_a_broken_dashboard_is_refused(dashboard: dict[str, Any]) -> None:
    """The control of the schema."""
    panel = next(panel for panel in dashboard["panels"] if panel["type"] == "timeseries")
    panel["targets"][0]["expression"] = panel["targets"][0].pop("expr")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(dashboard, SCHEMA)


def test_every_expression_is_closed_and_asks_for_the_model(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        assert expression.count("(") == expression.count(")"), expression
        selectors = re.findall(rf"{PREFIX}\w+(\{{[^}}]*\}})?", expression)
        assert selectors and all('model_name=~"$model"' in selector for selector in selectors), expression
        assert all(
            part.endswith("[$__rate_interval])") for part in re.findall(r"(?:rate|increase)\([^)]*\)", expression)
        )


def test_the_dashboard_shows_what_is_exported(dashboard: dict[str, Any]) -> None:
    shown = {name for expression in expressions(dashboard) for name in family_names(expression)}
    assert shown == exported()


def test_the_alerts_ask_for_what_is_exported() -> None:
    text = (DASHBOARD.parent / "alerts.yml").read_text("utf-8")
    asked = set(family_names(text))
    assert asked and asked <= exported()


def test_the_document_names_what_is_exported() -> None:
    """Every metric has a row in a table of docs/metrics.md, and no row is of another."""
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith(f"| `{PREFIX}")]
    assert sorted(name for row in rows for name in NAME.findall(row)) == sorted(exported())
    assert set(family_names(text)) <= exported()


def test_labels_of_the_document_are_those_of_the_metrics() -> None:
    RoundMetrics(["model_name"], 2)
    PolicyMetrics({"model_name": "m"})
    with captures():
        own = {metric._name: set(metric._labelnames) - {"model_name"} for metric in list(REGISTRY._collector_to_names)
               if getattr(metric, "_name", "").startswith(PREFIX)}  # fmt: skip
    forget()
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    documented = dict(re.findall(rf"^\| `({PREFIX}\w+)(?:\{{(\w+)\}})?`", text, re.MULTILINE))
    assert {name.removesuffix("_total"): {label} - {""} for name, label in documented.items()} == own
