"""Inert names of torchvision where it is not installed: every import succeeds, every use raises.

SGLang imports torchvision for its image processors even when it serves a text model, and the CUDA build of torchvision,
which takes seconds to import, does not load beside a CPU build of torch. torch calls `provide` at the end of its own
import (entry point "torch.backends").
"""

import enum
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

VERSION = "0.28.0"  # the release that pairs with torch 2.13, for code that compares versions at import


class InterpolationMode(enum.Enum):
    """The real values: SGLang's configuration classes read them while they are being defined."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _refuse(name: str):
    raise NotImplementedError(
        f"{name} was used, but this environment serves text only: to process images, install a torchvision that "
        f"matches your torch build."
    )


class _InertType(type):
    """Classes that can be named, subclassed and annotated with, but not instantiated or read."""

    def __call__(cls, *args, **kwargs):
        _refuse(f"{cls.__module__}.{cls.__qualname__}")

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _inert(f"{cls.__module__}.{cls.__qualname__}", name)


def _inert(owner: str, name: str) -> type:
    return _InertType(name, (), {"__module__": owner})


class _InertModule(types.ModuleType):
    __version__ = VERSION

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = InterpolationMode if name == "InterpolationMode" else _inert(self.__name__, name)
        setattr(self, name, value)
        return value


class _InertFinder(MetaPathFinder, Loader):
    """Asked last, where nothing else is found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, inside = fullname.partition(".")
        # Modules that a real torchvision lacks stay missing.
        known = top == "torchvision" and (not inside or isinstance(sys.modules.get(top), _InertModule))
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _InertModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: names appear when they are asked for."""


def provide() -> None:
    """Find the names from now on."""
    sys.meta_path.append(_InertFinder())
