"""Lists of plugins are read as each engine reads them, by its own loader over real entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import VLLM_PYTHON

from eagle_plugin.common.allow_list import ALLOW_LISTS, ENTRY_POINT

VALUES = (
    None,
    "",
    ",",
    "eagle_plugin",
    " eagle_plugin",
    "other, eagle_plugin",
    "other",
    "eagle-plugin",
    "EAGLE_PLUGIN",
)
SCRIPTS = {
    "sglang": (sys.executable, "from sglang.srt.plugins import load_plugins_by_group as load", "sglang.srt.plugins"),
    "vllm": (str(VLLM_PYTHON), "from vllm.plugins import load_plugins_by_group as load", "vllm.general_plugins"),
}
SCRIPT = """
import json, os, sys
{load}
found = []
for value in json.load(sys.stdin):
    os.environ.pop({variable!r}, None)
    if value is not None:
        os.environ[{variable!r}] = value
    found.append({name!r} in load({group!r}))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_list_drops_us_as_the_engine_does(engine: str) -> None:
    python, load, group = SCRIPTS[engine]
    if not Path(python).exists():
        pytest.skip("there is no .venv-vllm; make it with `make env-vllm`")
    allowed = ALLOW_LISTS[engine]
    script = SCRIPT.format(load=load, variable=allowed.variable, name=ENTRY_POINT, group=group)
    child = os.environ | ({"PYTHONPATH": ""} if engine == "vllm" else {})
    done = subprocess.run([python, "-c", script], input=json.dumps(VALUES), capture_output=True, text=True, env=child)
    loaded = json.loads(done.stdout.splitlines()[-1])
    environments = [{} if value is None else {allowed.variable: value} for value in VALUES]
    assert loaded == [not allowed.drops(environment=one) for one in environments]
    assert True in loaded and False in loaded
    for one in environments:
        name, _, value = allowed.repaired(environment=one).partition("=")
        assert name == allowed.variable and not allowed.drops(environment={name: value})


def test_the_sentence_names_list_and_value() -> None:
    assert ALLOW_LISTS["vllm"].sentence({"VLLM_PLUGINS": "a,b"}) == (
        "VLLM_PLUGINS is 'a,b' and does not name eagle_plugin, so that the engine drops the plugin and does not say so"
    )
