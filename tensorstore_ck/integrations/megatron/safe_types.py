"""The types that Megatron's ``core/safe_globals.py`` lists and the standard library lacks, as types that the store can hold."""

from enum import Enum
from functools import partial
from io import BytesIO

from megatron.core.optimizer import OptimizerConfig
from megatron.core.safe_globals import SAFE_GLOBALS

from tensorstore_ck.integrations.trainer.attach import register_attributes
from tensorstore_ck.state import register_type


def register_safe_types() -> None:
    """Lets the states of this process hold them. May be called again."""
    for kind in (listed for listed in SAFE_GLOBALS if isinstance(listed, type) and issubclass(listed, Enum)):
        register_type(kind, f"megatron.{kind.__name__}", lambda member: member.name, partial(type(kind).__getitem__, kind))
    register_attributes(OptimizerConfig, "megatron.OptimizerConfig")
    register_type(BytesIO, "io.BytesIO", BytesIO.getvalue, BytesIO)
