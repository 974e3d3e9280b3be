"""Names in an engine's source, by its syntax trees, against what Python finds when it imports the same files."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from eagle_plugin.runtime.engine_contract import (
    attributes,
    differences,
    names_of_servers,
    touched_places,
    wanted_names,
)
from eagle_plugin.runtime.engine_source import EngineSource

FILES = {
    "__init__.py": "from .parts import Part as Piece\nfrom made.parts import helper\nimport made.values as values\n",
    "parts.py": '''
from made.base import Base
import typing

class Part(Base[int]):
    """Documented."""
    size: int = 3

    def __init__(self, a, /, b, *rest, c=1, **more):
        self.kept = a

    async def wait(self): ...

    @classmethod
    def make(cls, x): ...

if typing.TYPE_CHECKING:
    from made.values import ONE
else:
    try:
        ONE = 1
    except ImportError:
        ONE = 2

def helper(x, y): return x
''',
    "base.py": """
class Base:
    def inherited(self, q): self.below: int = q

    def __class_getitem__(cls, key): return cls
""",
    "values.py": "ONE, TWO = 1, 2\n",
}


@pytest.fixture
def source(tmp_path: Path) -> EngineSource:
    (tmp_path / "made").mkdir()
    for name, text in FILES.items():
        (tmp_path / "made" / name).write_text(text)
    return EngineSource(tmp_path, "made")


@pytest.mark.parametrize(
    "place",
    [
        "made.Piece.__init__", "made.parts.Part.wait", "made.Piece.make", "made.Piece.inherited", "made.helper",
        "made.base.Base.inherited",
    ],
)  # fmt: skip
def test_parameters_are_those_that_python_finds(
    place: str, source: EngineSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(source.folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "made"]:
        monkeypatch.delitem(sys.modules, name)
    owner = importlib.import_module("made")
    importlib.import_module("made.base")
    for name in place.split(".")[1:]:
        owner = inspect.getattr_static(owner, name)
    function = owner.__func__ if isinstance(owner, classmethod) else owner
    declared = source.find(place)
    assert declared is not None and declared.parameters == tuple(inspect.signature(function).parameters)


def test_names_of_other_kinds(source: EngineSource) -> None:
    found = (
        "made.Piece",
        "made.Piece.size",
        "made.Piece.kept",
        "made.Piece.below",
        "made.parts.ONE",
        "made.values.TWO",
    )
    assert all((declared := source.find(place)) and declared.parameters is None for place in (*found, "made.parts"))
    for place in (
        "made.Pieces",
        "made.Piece.sized",
        "made.helper.x",
        "other.Piece",
        "made.parts.TWO",
        "made.nothing.x",
    ):
        assert source.find(place) is None


def test_only_code_counts(source: EngineSource) -> None:
    def digests(of: EngineSource) -> list[str]:
        return [one.digest for name in ("Piece", "helper") if (one := of.find(f"made.{name}"))]

    before = digests(source)
    file = source.folder / "made/parts.py"
    file.write_text(FILES["parts.py"].replace("Documented.", "Of another text.").replace("return x", "return y  # y"))
    after = digests(EngineSource(source.folder, "made"))
    assert after[0] == before[0] and after[1] != before[1]


def test_what_an_adapter_touches_and_what_is_otherwise(source: EngineSource, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "one.py").write_text(
        "from made import Piece\nHOOK = 'made.parts.helper'\ndef f():\n    import made.values\n"
    )
    assert touched_places("made", adapter) == ["made.Piece", "made.parts.helper", "made.values"]
    contract = {
        "made.Piece": {"make": "cls x", "inherited": "self ...", "wait": "self more", "gone": ""},
        "made.parts": {"helper": "x"},
        "made.values": attributes("ONE THREE"),
    }
    found = [str(one) for one in differences(source, wanted_names("made", adapter, contract))]
    assert found == [
        "made.parts.helper takes (x, y), wanted (x)",
        "made.Piece.wait takes (self), wanted (self, more)",
        "made.Piece.gone is gone",
        "made.values.THREE is gone",
    ]


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError, match="no package made_of_nothing is installed"):
        EngineSource.installed("made_of_nothing")


def test_a_server_does_without_what_the_doctor_touches(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from made import Piece\n")
    (tmp_path / "doctor.py").write_text("from made import Piece\nfrom made.parts import Parser\n")
    contract = {"made.Piece": {"make": "cls x"}, "made.parts.Parser": {"parse": "self"}}
    names = {"made.Piece": "", "made.Piece.make": "cls x"}
    assert names_of_servers("made", tmp_path, contract) == names
    wanted = wanted_names("made", tmp_path, contract)
    assert wanted == names | {"made.parts.Parser": "", "made.parts.Parser.parse": "self"}
