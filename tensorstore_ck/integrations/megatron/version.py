"""The versions of Megatron-core that are supported."""

from typing import Final

import megatron.core

from tensorstore_ck.errors import MissingExtraError

SUPPORTED: Final = ((0, 16), (0, 20))
"""From the first up to, but not including, the second."""
SUPPORTED_PACKAGE: Final = "megatron-core>=0.16,<0.20"


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
    lowest, above = SUPPORTED
    if not lowest <= _installed() < above:
        raise MissingExtraError(
            f"Megatron-core {megatron.core.__version__} is not supported: run `pip install '{SUPPORTED_PACKAGE}'`",
            object_id="megatron-core",
        )


def _installed() -> tuple[int, ...]:
    return tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
