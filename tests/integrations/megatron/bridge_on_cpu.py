"""Megatron Bridge on a machine without GPUs: empty modules replace the packages that need CUDA. Imported before Bridge is."""

import importlib
import sys
import typing
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import typing_extensions

from tests.integrations.megatron import on_cpu

MISSING = ("modelopt", "omegaconf", "transformer_engine", "megatron.energon")


class _Anything(type):
    """A class that has any attribute, which is a class like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(cls, name, made)
        return made

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class _Empty(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_Anything("module", (), {}), name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = any(fullname == name or fullname.startswith(f"{name}.") for name in MISSING)
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


if not hasattr(typing, "override"):
    vars(typing)["override"] = typing_extensions.override  # Bridge is for Python 3.12
importlib.import_module("megatron.training")  # before there seems to be a Transformer Engine
sys.meta_path.append(_Finder())  # asked where nothing else has found the module

__all__ = ["on_cpu"]
