"""The versions of Megatron-core that are supported."""

from typing import Final

import megatron.core

from tensorstore_ck.integrations.trainer.versions import Package, numbers_of

PACKAGE: Final = Package(title="Megatron-core", name="megatron-core", lowest=(0, 16), above=(0, 20), tested="megatron-core==0.19.2")
"""Tested with 0.16.1, too."""


def has_registry() -> bool:
    """Whether Megatron-core has a registry of strategies: 0.17 and newer know their own alone."""
    return numbers_of(megatron.core.__version__) < (0, 17)


def keeps_common_state_as_object() -> bool:
    """Whether the common state is a sharded object of a checkpoint, and not a file."""
    return numbers_of(megatron.core.__version__) >= (0, 19)


def require_supported_version() -> None:
    """Called before anything of Megatron-core is imported that other versions lack. Raises `MissingExtraError` for one of these."""
    PACKAGE.require_version(megatron.core.__version__)
