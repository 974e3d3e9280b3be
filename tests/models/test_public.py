"""Public models by name: what the list says, and what a command does where the hub can be reached and where not."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from wild_heads import write
from wild_layouts import LAYOUTS

from eagle_plugin.bench import serve
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.cli import main
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.models import PUBLIC, ModelError, fetch_repository, head_folder, target_folder

TARGETS = (Path(__file__).parents[2] / "docs" / "targets.md").read_text("utf-8")
NAME = "qwen3-4b"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: Path) -> dict[str, Path]:
    """A hub with the target and the head of `NAME`, the head in the layout of its trainer."""
    stored = {
        PUBLIC[NAME].target: tiny_target,
        PUBLIC[NAME].head: write(LAYOUTS["AngelSlim"], tmp_path / "hub", tiny_target),
    }

    def download(name: str, **options: object) -> str:
        if name not in stored:
            raise LocalEntryNotFoundError("not there")
        return str(stored[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return stored


@pytest.mark.parametrize("name", PUBLIC)
def test_every_id_is_in_the_document(name: str) -> None:
    public = PUBLIC[name]
    assert name == public.target.partition("/")[2].lower()
    assert f"`{public.target}`" in TARGETS and f"`{public.head}`" in TARGETS


def test_bytes_of_weights() -> None:
    """16 bits per parameter, and 4.25 for the experts of gpt-oss, whose checkpoints OpenAI gives 12.8 and 60.8 GiB."""
    assert PUBLIC["qwen3-8b"].weights_gb == pytest.approx(16.4)
    for name, gib in (("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)):
        assert PUBLIC[name].weights_gb * 1e9 / 2**30 == pytest.approx(gib, rel=0.01)


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    printed = capsys.readouterr().out
    assert "gpt-oss-20b  14 GB\n  openai/gpt-oss-20b with the head amazon/GPT-OSS-20B-P-EAGLE" in printed
    assert all(f"\n{name}  " in printed for name in PUBLIC)


@pytest.mark.parametrize(("engine", "is_rewritten"), [("sglang", True), ("vllm", False)])
def test_one_name_is_a_whole_server(
    engine: str, is_rewritten: bool, hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = serve.parse([NAME, "--engine", engine, "--device", "cpu", "--", "--tp", "2"])
    target = target_folder(options.target)
    spec = serve.server_spec(options, target)
    assert spec.target == hub[PUBLIC[NAME].target] and spec.mode == "plugin" and spec.extra_flags == ("--tp", "2")
    assert spec.head is not None and (spec.head != hub[PUBLIC[NAME].head]) == is_rewritten
    if is_rewritten:
        check_head(target, spec.head, algorithm="EAGLE3")
        monkeypatch.setattr("subprocess.run", None)  # the second time it is there
        assert serve.server_spec(options, target).head == spec.head


def test_a_head_of_your_own_for_a_public_target(hub: dict[str, Path], tiny_eagle3: Path) -> None:
    options = serve.parse([NAME, "--device", "cpu", "--head", str(tiny_eagle3)])
    assert serve.server_spec(options, target_folder(NAME)).head == tiny_eagle3


def test_a_head_that_sglang_cannot_serve(hub: dict[str, Path], tmp_path: Path, tiny_target: Path) -> None:
    shutil.rmtree(hub[PUBLIC[NAME].head])
    write(LAYOUTS["speculators, norm before the residual"], hub[PUBLIC[NAME].head], tiny_target)
    options = serve.parse([NAME, "--engine", "sglang", "--device", "cpu"])
    with pytest.raises(ServerError, match=f"{PUBLIC[NAME].head} cannot be served by SGLang: .*norm_before_residual"):
        serve.server_spec(options, tiny_target)
    assert not (tmp_path / "cache" / "heads" / NAME).exists()


def test_such_a_head_is_refused_before_its_target_is_fetched(
    hub: dict[str, Path], tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(hub[PUBLIC[NAME].head])
    write(LAYOUTS["speculators, norm before the residual"], hub[PUBLIC[NAME].head], tiny_target)
    del hub[PUBLIC[NAME].target]
    monkeypatch.setattr(serve, "check_engine", lambda *_: None)
    for engine, reason in (("sglang", "norm_before_residual true"), ("vllm", f"{PUBLIC[NAME].target} could not be")):
        assert serve.main([NAME, "--engine", engine, "--device", "cpu"]) == 2
        assert reason in " ".join(capsys.readouterr().out.split())


def test_names_are_targets_and_heads_of_every_command(hub: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", NAME, PUBLIC[NAME].head, "--files-only", "--engine", "vllm"]) == 0
    assert f"head               {hub[PUBLIC[NAME].head]}" in capsys.readouterr().out
    for command in (["models", "get", NAME], ["models", "path", NAME]):
        assert main(command) == 0
        assert capsys.readouterr().out.splitlines()[0] == str(hub[PUBLIC[NAME].target])


def test_without_the_hub(hub: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = (
        r"openai/gpt-oss-20b could not be fetched from the Hugging Face hub \(it is not in the hub's cache of this "
        r"machine, and the hub cannot be reached from here\); where the hub can be reached, run: hf download "
        r"openai/gpt-oss-20b --local-dir FOLDER, and give that folder$"
    )
    with pytest.raises(ModelError, match=sentence):
        target_folder("gpt-oss-20b")
    with pytest.raises(ModelError, match="amazon/GPT-OSS-20B-P-EAGLE could not be fetched"):
        head_folder("amazon/GPT-OSS-20B-P-EAGLE")
    assert main(["models", "path", "gpt-oss-20b"]) == 2
    assert "run: eagle-plugin models get gpt-oss-20b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (GatedRepoError, "it is gated: ask for access on its page of the hub, and set HF_TOKEN"),
        (RepositoryNotFoundError, "there is no such repository, or it is private: correct the name, or set HF_TOKEN"),
    ],
)
def test_without_access(kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    response = httpx.Response(401, request=httpx.Request("GET", "https://hub.invalid/api"))

    def refuse(name: str, **options: object) -> str:
        raise kind("401 Client Error. (Request ID: 1)\n\nCannot access it.", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=rf"own/model could not be fetched .*\({reason}"):
        fetch_repository("own/model")


def test_a_pickle_is_not_fetched(hub: dict[str, Path]) -> None:
    (hub[PUBLIC[NAME].head] / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{PUBLIC[NAME].head} has no safetensors .*docs/targets.md"):
        fetch_repository(PUBLIC[NAME].head)


def test_a_name_and_a_target_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse([NAME, "--target", "elsewhere"])
    assert f"NAME is {NAME} and --target elsewhere" in capsys.readouterr().err
