"""A package: its files, what they say, and an engine that its own serve.sh starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from serving import _next_port as next_port

from eagle_plugin.cli import main
from eagle_plugin.common.file_digests import find_damage
from eagle_plugin.heads.create import continue_as
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import describe_target
from eagle_plugin.learning.deploy import package
from eagle_plugin.learning.deploy.package import PackageError, write_package
from eagle_plugin.learning.deploy.package_files import ENGINES, _deployed_name
from eagle_plugin.sglang import version as sglang
from eagle_plugin.vllm import version as vllm

VLLM = Path(__file__).parents[2] / ".venv-vllm/bin"
FLAGS = {
    "sglang": "--device cpu --dtype float32 --context-length 512 --max-total-tokens 1024 --max-running-requests 2",
    "vllm": "--dtype float32 --max-model-len 512 --max-num-seqs 2 --enforce-eager --num-gpu-blocks-override 16",
}
VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(params=["sglang", "vllm"])
def made(request, tmp_path, tiny_target, tiny_eagle3) -> Path:
    write_package(tiny_target, tiny_eagle3, tmp_path / "a package", request.param)
    return tmp_path / "a package"


def test_a_package_is_whole_and_damage_is_found(made, tiny_target) -> None:
    assert find_damage(made) == []
    manifest = json.loads((made / "package.json").read_text())
    assert manifest["target"] == describe_target(tiny_target) and not (made / "target").exists()
    assert manifest["measured"] == {} and manifest["lineage"] is None
    (made / "head/model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors has 7 bytes" in find_damage(made)[0]


def test_the_script_is_a_shell_script_that_refuses_a_missing_target(made) -> None:
    script = made / "serve.sh"
    assert subprocess.run(["sh", "-n", str(script)]).returncode == 0 and os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -eu" in text and text.rstrip().endswith('"$@"')
    assert not bare_variables(text) and bare_variables(text.replace('"$target"', "$target"))
    ran = subprocess.run([str(script)], env=os.environ | {"TARGET": "/no where"}, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr == "error: there is no target in /no where; set TARGET to its folder\n"


def bare_variables(text: str) -> list[str]:
    """Variables outside of quotes, which a path with a space would break."""
    lines = (re.sub(r'"(?:\\.|[^"\\])*"', "", line) for line in text.splitlines() if not line.startswith("#"))
    return [name for line in lines for name in re.findall(r"\$(?:here|target|host|port)\b", line)]


def test_vllm_is_told_of_a_head_that_drafts_in_parallel(tmp_path, tiny_target, tiny_eagle3) -> None:
    """Else its own worker, which serves where the plugin does not, asks it for one token after the other."""
    parallel = continue_as("peagle", load_any_head(tiny_eagle3, tiny_target), tiny_target, mask_token_id=2)
    save_head(parallel, tmp_path / "peagle", target_dir=tiny_target)
    for head, wanted in ((tiny_eagle3, None), (tmp_path / "peagle", True)):
        write_package(tiny_target, head, tmp_path / "made", "vllm")
        (line,) = re.findall(r'--speculative-config "(.*)" \\\n', (tmp_path / "made/serve.sh").read_text())
        assert json.loads(json_of(line)).get("parallel_drafting") is wanted


def json_of(line: str, tokens: str = "5") -> str:
    """What the shell makes of the option's value."""
    return line.replace("${DRAFT_TOKENS:-5}", tokens).replace('\\"', '"')


def test_the_number_of_speculative_tokens_is_that_of_the_documents(tmp_path, tiny_target, tiny_eagle3, capsys) -> None:
    """Of vLLM: in the container, which has a GPU, and where serve.sh runs without it."""
    numbers = {}
    for page in ("gpu.md", "vllm.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
        numbers[page] = re.findall(r'"num_speculative_tokens": (\d+)[}]', text)[0]
    write_package(tiny_target, tiny_eagle3, tmp_path / "made", "vllm")
    assert f"\nENV DRAFT_TOKENS={numbers['gpu.md']}\n" in (tmp_path / "made/Dockerfile").read_text()
    (line,) = re.findall(r'--speculative-config "(.*)" \\\n', (tmp_path / "made/serve.sh").read_text())
    assert f"${{DRAFT_TOKENS:-{numbers['vllm.md']}}}" in line
    done = subprocess.run(["sh", "-c", f'here=/x; echo "{line}"'], env={"DRAFT_TOKENS": "9"}, capture_output=True)
    assert json.loads(done.stdout)["num_speculative_tokens"] == 9
    out = tmp_path / "head"
    assert main(["export", str(tiny_eagle3), str(out), "--target", str(tiny_target)]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r'"num_speculative_tokens": (\d+)', printed) == [numbers["vllm.md"], numbers["gpu.md"]]


def test_the_other_files_can_be_used(made) -> None:
    deployment, service = yaml.safe_load_all((made / "kubernetes.yaml").read_text())
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["targetPort"]
    volumes = {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    docker = (made / "Dockerfile").read_text()
    (image,) = re.findall(r"^FROM (\S+)$", docker, re.MULTILINE)
    assert re.fullmatch(r"\S+:v\d+\.\d+\.\d+", image) and "latest" not in docker
    assert "digests.json" in (made / "README.md").read_text()


def test_the_plugin_serves_in_the_container_and_can_be_watched(made) -> None:
    """vLLM leaves a GPU to its own worker without EAGLE_PLUGIN=force; `watch` and `deploy` read SGLang's metrics."""
    (container,) = next(yaml.safe_load_all((made / "kubernetes.yaml").read_text()))["spec"]["template"]["spec"][
        "containers"
    ]
    set_in_kubernetes = {"name": "EAGLE_PLUGIN", "value": "force"} in container["env"]
    set_in_docker = "\nENV EAGLE_PLUGIN=force\n" in (made / "Dockerfile").read_text()
    is_vllm = json.loads((made / "package.json").read_text())["engine"]["name"] == "vllm"
    assert set_in_kubernetes == set_in_docker == is_vllm
    assert ("EAGLE_PLUGIN=0` the engine serves alone" in (made / "README.md").read_text()) == is_vllm
    assert ("--enable-metrics" in (made / "serve.sh").read_text()) == (not is_vllm)


def test_a_container_that_starts_again_has_the_record_of_its_self_test(made) -> None:
    """Else a server whose self-test fails with the loaded models would fail at every start of its pod."""
    pod = next(yaml.safe_load_all((made / "kubernetes.yaml").read_text()))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (folder,) = [variable["value"] for variable in container["env"] if variable["name"] == "EAGLE_CACHE_DIR"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    assert not mount.get("readOnly") and {"name": mount["name"], "emptyDir": {}} in pod["volumes"]


@pytest.mark.parametrize(
    ("target", "head", "name"),
    [("Llama-3", "v2", "llama-3-v2"), ("4bit", "v2", "head-4bit-v2"), ("0" * 60, "v", "head-" + "0" * 45)],
)
def test_kubernetes_takes_the_name(target: str, head: str, name: str) -> None:
    assert _deployed_name(target, head) == name
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)


def test_a_probe_waits_for_the_answer(made) -> None:
    """SGLang's /health generates a token and sleeps for a second, which is Kubernetes' own limit."""
    (container,) = next(yaml.safe_load_all((made / "kubernetes.yaml").read_text()))["spec"]["template"]["spec"][
        "containers"
    ]
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    assert len(probes) == 2 and all(probe["timeoutSeconds"] >= 5 for probe in probes)


def test_the_versions_are_the_tested_ones() -> None:
    assert (ENGINES["sglang"].version, ENGINES["vllm"].version) == (sglang.TESTED[-1], vllm.TESTED[-1])
    assert all(engine.image.endswith(f":v{engine.version}") for engine in ENGINES.values())


def test_the_results_of_a_job_are_in_the_package(tmp_path, tiny_target, tiny_eagle3) -> None:
    head = tmp_path / "job/train/base/head"
    head.mkdir(parents=True)
    for path in tiny_eagle3.iterdir():
        (head / path.name).write_bytes(path.read_bytes())
    (tmp_path / "job/benchmark").mkdir()
    for name, values in {
        "eval.json": {"accept_length": 2.5},
        "benchmark/states.json": {"verdict": "twice as fast", "measurements": [1]},
        "lineage.json": {"version": 1},
    }.items():
        (tmp_path / "job" / name).write_text(json.dumps(values))
    out = tmp_path / "out"
    for _ in range(2):  # the second replaces the first
        assert main(["package", str(tiny_target), str(head), "--out", str(out), "--copy-target"]) == 0
    manifest = json.loads((out / "package.json").read_text())
    assert manifest["measured"]["benchmark"] == {"verdict": "twice as fast"} and manifest["lineage"] == {"version": 1}
    assert manifest["measured"]["evaluation"] == {"accept_length": 2.5}
    assert "twice as fast" in (out / "README.md").read_text()
    assert (out / "target/config.json").is_file() and manifest["head"]["name"] == "base"


def test_a_package_is_written_whole_or_not_at_all(tmp_path, tiny_target, tiny_eagle3, monkeypatch) -> None:
    def broken(part: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package, "_flush", broken)
    assert main(["package", str(tiny_target), str(tiny_eagle3), "--out", str(tmp_path / "out")]) == 2
    assert not list(tmp_path.iterdir())


def test_what_is_no_package_stays(tmp_path, tiny_target, tiny_eagle3) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").write_text("x")
    with pytest.raises(PackageError, match="exists and is no package; remove it"):
        write_package(tiny_target, tiny_eagle3, tmp_path / "mine", "sglang")
    with pytest.raises(PackageError, match="wanted one of sglang, vllm"):
        write_package(tiny_target, tiny_eagle3, tmp_path / "out", "tgi")
    with pytest.raises(PackageError, match=r"holds no config.json; give the folder of a head"):
        write_package(tiny_target, tmp_path, tmp_path / "out", "sglang")
    assert (tmp_path / "mine/letter").read_text() == "x"


@pytest.mark.server
def test_sglang_serves_its_package(tmp_path, tiny_target, tiny_eagle3) -> None:
    _serves("sglang", Path(sys.executable).parent, tmp_path, tiny_target, tiny_eagle3)


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")
def test_vllm_serves_its_package(tmp_path, tiny_target, tiny_eagle3) -> None:
    _serves("vllm", VLLM, tmp_path, tiny_target, tiny_eagle3)


def _serves(engine: str, commands: Path, folder: Path, target: Path, head: Path) -> None:
    """commands: the folder of the engine's commands."""
    write_package(target, head, folder / "package", engine)
    port, log = next_port(), folder / "log"
    own = {"PORT": str(port), "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment = os.environ | VARIABLES | own
    if commands == VLLM:
        environment.pop("PYTHONPATH", None)  # of this environment, which holds another transformers
    command = [str(folder / "package/serve.sh"), *FLAGS[engine].split()]
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while not _healthy(url):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        body = {"model": str(target), "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 8
        assert "is served by the plugin's draft trees" in log.read_text(), "the plugin does not serve"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False
