"""The text files of a package: serve.sh, Dockerfile, kubernetes.yaml, README.md and package.json."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eagle_plugin.common.learnt import COLUMNS, source_rows
from eagle_plugin.sglang.version import TESTED as SGLANG
from eagle_plugin.vllm.version import TESTED as VLLM


class Engine(NamedTuple):
    """The newest version that the plugin was tested with, the image of that version, and the server's port."""

    version: str
    image: str
    port: int
    command: str  # of serve.sh; $target and $here are set, and refused if JSON could not hold $here
    environment: dict[str, str]  # without which the plugin does not serve on the GPU of a container


ENGINES = {
    "sglang": Engine(
        SGLANG[-1],
        f"lmsysorg/sglang:v{SGLANG[-1]}",
        30000,
        "exec python3 -m sglang.launch_server --model-path \"$target\" \\\n"
        "    --speculative-algorithm {algorithm} --speculative-draft-model-path \"$here/head\" \\\n"
        '    --host "$host" --port "$port" --enable-metrics "$@"',
        {},
    ),
    "vllm": Engine(
        VLLM[-1],
        f"vllm/vllm-openai:v{VLLM[-1]}",
        8000,
        'exec vllm serve "$target" \\\n'
        '    --speculative-config "{{\\"method\\": \\"{method}\\", \\"model\\": \\"$here/head\\", '
        '\\"num_speculative_tokens\\": ${{DRAFT_TOKENS:-5}}{options}}}" \\\n'
        '    --host "$host" --port "$port" "$@"',
        {"EAGLE_PLUGIN": "force", "DRAFT_TOKENS": "7"},  # docs/gpu.md; serve.sh alone is for a CPU too
    ),
}  # fmt: skip
SCRIPT = """\
#!/bin/sh
# Serves the target with the draft head of this folder. Further arguments go to the engine.
#   TARGET=/models/target HOST=127.0.0.1 PORT={port} ./serve.sh
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
target=${{TARGET:-{target}}}
host=${{HOST:-127.0.0.1}}
port=${{PORT:-{port}}}
case "$here" in
*[\\"\\\\]*)
    echo "error: the path $here has a quote or a backslash, which the engine cannot read; move the package" >&2
    exit 2
    ;;
esac
if [ ! -f "$target/config.json" ]; then
    echo "error: there is no target in $target; set TARGET to its folder" >&2
    exit 2
fi
{command}
"""
DOCKERFILE = """\
# The engine with the plugin and this head. Put the plugin's wheel (EAGLE_BUILD=cuda make wheel) into this folder, then:
#   docker build -t {name} .
FROM {image}
COPY eagle_plugin-{plugin}-*.whl /tmp/
RUN python3 -m pip install --no-cache-dir /tmp/eagle_plugin-{plugin}-*.whl
COPY . /package
# A container has an address of its own, so the server listens on all of them.
ENV HOST=0.0.0.0 PORT={port} TARGET={target}
{environment}EXPOSE {port}
ENTRYPOINT ["/package/serve.sh"]
"""
README = """\
# {name}

A draft head for `{target}` that {engine} {version} serves with eagle-plugin {plugin}.

```
TARGET=/folder/of/the/target ./serve.sh
```

`serve.sh` passes all further arguments to the engine. The target is {where}. Its digests are in `package.json`; the
head fits a target with the same digests only. `eagle-plugin check TARGET head` says whether it does.

| file | what it is |
|---|---|
| `head/` | the weights (safetensors) and the config of the draft head |
| `serve.sh` | starts the engine; variables: `TARGET`, `HOST`, `PORT`{variables} |
| `Dockerfile` | the engine's image, with the plugin and this package |
| `kubernetes.yaml` | a Deployment and a Service; the target is on a volume claim named `models` |
| `package.json` | target, head, versions, lineage and what was measured |
| `digests.json` | size and sha256 of every file |

## What it learnt from

{learnt}

## Is it faster?

{verdict}

`eagle-plugin benchmark TARGET --head head` measures it on your machine. `EAGLE_PLUGIN=0 ./serve.sh` serves without the
plugin: the engine's own EAGLE.

## In a container

Copy the plugin's wheel (`EAGLE_BUILD=cuda make wheel`) into this folder, run `docker build -t {name} .`, and mount the
target:

```
docker run --rm --gpus all --shm-size 1g -p 127.0.0.1:{port}:{port} -v /folder/of/the/target:{mounted}:ro {name}
```

{forced}\
For Kubernetes, push the image, correct `image` in `kubernetes.yaml`, and run `kubectl apply -f kubernetes.yaml`. It
asks for one GPU.
"""
CACHE = "/cache"  # of the plugin: what its self-test found, and what a round costs
FORCED = """\
In the container `EAGLE_PLUGIN` is `force`: on a GPU the plugin serves in {engine} only with it. With
`-e EAGLE_PLUGIN=0` the engine serves alone. If the self-test fails with the loaded models, the start ends, and the next
one is left to the engine's own worker where the record is kept: add `-e EAGLE_CACHE_DIR=/cache -v {name}-cache:/cache`,
as `kubernetes.yaml` does with a volume of the pod.

"""
DRAFT_TOKENS = "; `DRAFT_TOKENS`, the number of speculative tokens: 5, in the container 7, which is for a GPU"
MOUNTED = "/models/target"


def package_files(manifest: dict[str, Any], target: Path | None, options: dict[str, Any]) -> dict[str, str]:
    """File name -> text.

    target: the folder that serve.sh serves unless TARGET names another (None: `target` in the package).
    options: of vLLM's --speculative-config, beside method, model and number of tokens.
    """
    engine = ENGINES[manifest["engine"]["name"]]
    algorithm = manifest["engine"]["algorithm"]
    name = _deployed_name(manifest["target"]["name"], manifest["head"]["name"])
    mounted = MOUNTED if target is not None else "/package/target"
    verdict = manifest["measured"].get("benchmark", {}).get("verdict")
    values = {
        "name": name,
        "engine": manifest["engine"]["name"],
        "version": engine.version,
        "plugin": manifest["versions"]["eagle-plugin"],
        "image": engine.image,
        "port": engine.port,
    }
    shown = "the folder `target` of this package" if target is None else "not in this package"
    more = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in options.items())
    command = engine.command.format(algorithm=algorithm, method=algorithm.lower(), options=more.replace('"', r"\""))
    # Within ${TARGET:-...} a quoted word stays one word.
    folder = '"$here/target"' if target is None else shlex.quote(str(target))
    return {
        "package.json": json.dumps(manifest, indent=1) + "\n",
        "serve.sh": SCRIPT.format(port=engine.port, target=folder, command=command),
        "Dockerfile": DOCKERFILE.format(
            target=mounted,
            environment="".join(f"ENV {key}={value}\n" for key, value in engine.environment.items()),
            **values,
        ),
        "kubernetes.yaml": _kubernetes(name, engine, mounted, target is not None),
        "README.md": README.format(
            target=manifest["target"]["name"],
            where=shown,
            mounted=mounted,
            learnt=_learnt(manifest["head"].get("training") or {}),
            verdict=verdict or "No benchmark is in this package.",
            variables=DRAFT_TOKENS if "DRAFT_TOKENS" in engine.environment else "",
            forced=FORCED.format(**values) if engine.environment else "",
            **values,
        ),
    }


def _learnt(training: dict[str, Any]) -> str:
    """The sources of a head with their licences, as Markdown."""
    rows = source_rows(training)
    if not rows:
        return "The head's manifest does not say it."
    lines = [f"Licence of the target: {_cell(training.get('target_license'))}.", ""]
    return "\n".join(
        [*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))]
    )


def _cell(value: object) -> str:
    """Text that ends no cell of a table and is no markup."""
    return re.sub(r"([\\`*_\[\]|<>#])", r"\\\1", " ".join(str(value).split()))


def _deployed_name(target: str, head: str) -> str:
    """Of the image, the Deployment and the Service, whose name must begin with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{target}-{head}".lower()).strip("-")
    return (name if name[:1].isalpha() else f"head-{name}")[:50].strip("-")


def _kubernetes(name: str, engine: Engine, mounted: str, volume: bool) -> str:
    """A Deployment of one server with one GPU, and its Service."""
    labels, port = {"app": name}, engine.port
    # SGLang answers /health after it has generated a token, which takes more than the second that Kubernetes waits.
    probe = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10, "timeoutSeconds": 10}
    # Kept when the container starts again: after a failed self-test the next start is left to the engine's own worker.
    variables = {"TARGET": mounted, "EAGLE_CACHE_DIR": CACHE, **engine.environment}
    container: dict[str, Any] = {
        "name": "server",
        "image": f"{name}:1",
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "ports": [{"containerPort": port}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "startupProbe": probe | {"failureThreshold": 180},
        "readinessProbe": probe,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": CACHE}],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "cache", "emptyDir": {}},
    ]
    if volume:
        mount = {"name": "models", "mountPath": mounted, "subPath": "target", "readOnly": True}
        container["volumeMounts"].append(mount)
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}})
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"port": port, "targetPort": port}]},
    }

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump_all([deployment, service], Dumper=Plain, sort_keys=False)
