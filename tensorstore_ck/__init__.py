"""tensorstore_ck: a content-addressed snapshot store for training state.

``__init__.pyi`` lists the public names; each is loaded when it is first used, so that this package and its commands start fast.
The areas are in ARCHITECTURE.md; those that are modules:

errors.py     every error that a caller can meet
events.py     the events of saves
redaction.py  text without secrets and control characters
"""

from importlib import import_module
from types import ModuleType

import lazy_loader

__version__ = "0.1.0"

_public, _, _names = lazy_loader.attach_stub(__name__, __file__)
_ADAPTERS = ("accelerate", "deepspeed", "hf", "lightning", "megatron", "mlflow", "nvrx", "ray", "titan", "wandb")
"""Adapters for trainers and trackers, each of which needs an extra: `tensorstore_ck.hf` is `tensorstore_ck.integrations.hf`."""
__all__ = sorted([*_names, *_ADAPTERS])  # noqa: PLE0605 - a list
_MODULES = ("errors", "events")
_HINTS = {
    "load": "tensorstore_ck.open(URL).checkout(ADDRESS)",
    "restore": "tensorstore_ck.open(URL).checkout(ADDRESS)",
    "save": "tensorstore_ck.open(URL, create=True).put_snapshot(STATE, ref=REF)",
    "connect": "tensorstore_ck.open(URL)",
    "init": "tensorstore_ck.open(URL, create=True)",
}
"""Names that users of other libraries type -> what they mean."""


class _Adapter(ModuleType):
    """An adapter, which is imported, with its trainer, when one of its names is first used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        from tensorstore_ck.common.user_frames import shorten  # noqa: PLC0415 - it takes time
        from tensorstore_ck.errors import StoreError  # noqa: PLC0415 - as above

        try:
            module = import_module(self.__name__)
        except StoreError as exc:
            shorten(exc)
            raise
        return getattr(module, name)

    def __dir__(self) -> list[str]:
        from tensorstore_ck.errors import MissingExtraError  # noqa: PLC0415 - as above

        try:
            return list(import_module(self.__name__).__all__)
        except MissingExtraError:
            return []


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _ADAPTERS:
        return globals().setdefault(name, _Adapter(f"{__name__}.integrations.{name}"))
    missing = f"module {__name__!r} has no attribute {name!r}"
    if name in _HINTS:
        raise AttributeError(f"{missing}: you may want {_HINTS[name]}", name="", obj=None)  # else Python guesses, too
    if name not in __all__:
        raise AttributeError(missing, name=name, obj=import_module(__name__))  # Python adds the name that is most like it
    return _public(name)
