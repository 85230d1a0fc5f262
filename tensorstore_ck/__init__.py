"""tensorstore_ck: a content-addressed snapshot store for training state.

``__init__.pyi`` lists the public names; each is loaded when it is first used, so that this package and its commands start fast.
The areas are in ARCHITECTURE.md; those that are modules:

errors.py     every error that a caller can meet
events.py     the events of saves
redaction.py  text without secrets and control characters
"""

from importlib import import_module

import lazy_loader

__version__ = "0.1.0"

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_ADAPTERS = ("accelerate", "deepspeed", "hf", "lightning", "megatron", "mlflow", "nvrx", "ray", "titan", "wandb")
"""Adapters for trainers and trackers, each of which needs an extra: `tensorstore_ck.hf` is `tensorstore_ck.integrations.hf`."""


def __getattr__(name: str) -> object:
    return import_module(f"tensorstore_ck.integrations.{name}") if name in _ADAPTERS else _public(name)


from tensorstore_ck import errors, events  # noqa: E402, F401 - public modules, found without an import of their own
