"""The versions of Megatron-core that are supported, and the types that its ``core/safe_globals.py`` lists and the standard library lacks,
as types that the store can hold.
"""

from enum import Enum
from functools import partial
from io import BytesIO
from typing import Final

import megatron.core
from megatron.core.optimizer import OptimizerConfig
from megatron.core.safe_globals import SAFE_GLOBALS

from tensorstore_ck.integrations.trainer.adapter import Package, numbers_of, register_attributes
from tensorstore_ck.state import register_type

PACKAGE: Final = Package(title="Megatron-core", name="megatron-core", lowest=(0, 16), above=(0, 20), tested="megatron-core==0.19.2")
"""Tested with 0.16.1, too."""


def has_registry() -> bool:
    """Whether Megatron-core has a registry of strategies: 0.17 and newer know their own alone."""
    return _installed() < (0, 17)


def keeps_common_state_as_object() -> bool:
    """Whether the common state is a sharded object of a checkpoint, and not a file."""
    return _installed() >= (0, 19)


def require_supported_version() -> None:
    """Called before anything of Megatron-core is imported that other versions lack.

    Raises:
        MissingExtraError: the installed version is not supported.
    """
    PACKAGE.require_version(megatron.core.__version__)


def _installed() -> tuple[int, ...]:
    return numbers_of(megatron.core.__version__)


def register_safe_types() -> None:
    """Lets the states of this process hold them. May be called again."""
    for kind in (listed for listed in SAFE_GLOBALS if isinstance(listed, type) and issubclass(listed, Enum)):
        register_type(kind, f"megatron.{kind.__name__}", lambda member: member.name, partial(type(kind).__getitem__, kind))
    register_attributes(OptimizerConfig, "megatron.OptimizerConfig")
    register_type(BytesIO, "io.BytesIO", BytesIO.getvalue, BytesIO)
