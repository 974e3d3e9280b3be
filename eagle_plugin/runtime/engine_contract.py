"""Checks whether an engine has every name that an adapter touches, as the adapter calls or replaces it.

Tests pin these names for the releases of `version.TESTED`. For any other release, `EAGLE_PLUGIN=force` asks here before
it lets the adapter in, and `make contract` prints what changed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.runtime.engine_source import EngineSource

# Of an owner (a class or a module), by name: "" where the name alone is enough, else the parameters of a function, all
# of them ("self logits") or the first ones ("self logits ...").
Contract = Mapping[str, Mapping[str, str]]

DOCTOR = "doctor.py"  # of an adapter: a command in a process of its own, which no server needs
_PLACE = re.compile(r"\w+(\.\w+)+")


class Difference(NamedTuple):
    """A name that is not there, or is called otherwise."""

    place: str
    found: str

    def __str__(self) -> str:
        return f"{self.place} {self.found}"


def touched_places(package: str, adapter: Path, without: str = "") -> list[str]:
    """The dotted names of an engine that the modules in a folder import, or give to the engine's own registry.

    without: the name of a file that is not looked at.
    """
    places = set()
    for file in sorted(file for file in adapter.rglob("*.py") if file.name != without):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and _below(node.module or "", package):
                places |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                places |= {alias.name for alias in node.names if _below(alias.name, package)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PLACE.fullmatch(node.value):
                places |= {node.value} if _below(node.value, package) and "eagle_plugin" not in node.value else set()
    return sorted(places)


def _below(place: str, package: str) -> bool:
    return place.partition(".")[0] == package


def wanted_names(package: str, adapter: Path, contract: Contract) -> dict[str, str]:
    """Every place of an engine that an adapter touches, with the parameters that it wants there."""
    wanted = dict.fromkeys(touched_places(package, adapter), "")
    for owner, names in contract.items():
        wanted.setdefault(owner, "")
        wanted |= {f"{owner}.{name}": parameters for name, parameters in names.items()}
    return wanted


def differences(source: EngineSource, wanted: Mapping[str, str]) -> list[Difference]:
    """What an engine does not have, or has with other parameters."""
    found = []
    for place, parameters in wanted.items():
        declared = source.find(place)
        if declared is None:
            found.append(Difference(place, "is gone"))
        elif parameters and not _agree(declared.parameters, parameters):
            has = "is no function" if declared.parameters is None else f"takes ({', '.join(declared.parameters)})"
            found.append(Difference(place, f"{has}, wanted ({', '.join(parameters.split())})"))
    return found


def _agree(found: tuple[str, ...] | None, wanted: str) -> bool:
    names = tuple(wanted.split())
    if found is None:
        return False
    return found[: len(names) - 1] == names[:-1] if names[-1] == "..." else found == names


def attributes(names: str) -> dict[str, str]:
    """Names that only have to be there."""
    return dict.fromkeys(names.split(), "")


def installed_differences(package: str, adapter: Path, contract: Contract) -> list[Difference]:
    """What the installed engine has otherwise than an adapter's servers want it.

    Raises ModuleNotFoundError without an engine.
    """
    return differences(EngineSource.installed(package), names_of_servers(package, adapter, contract))


def names_of_servers(package: str, adapter: Path, contract: Contract) -> dict[str, str]:
    """`wanted_names` without those that only DOCTOR touches."""
    served = touched_places(package, adapter, without=DOCTOR)
    apart = tuple(f"{place}." for place in set(touched_places(package, adapter)) - set(served))
    wanted = wanted_names(package, adapter, contract).items()
    return {place: parameters for place, parameters in wanted if not f"{place}.".startswith(apart)}
