"""The versions of Megatron-core that are supported: 0.17 has no strategies that this package could add one to."""

from typing import Final

import megatron.core

from tensorstore_ck.errors import MissingExtraError

SUPPORTED: Final = ((0, 16), (0, 17))
"""From the first up to, but not including, the second."""
SUPPORTED_PACKAGE: Final = "megatron-core>=0.16,<0.17"


def require_supported_version() -> None:
    """Called before anything of Megatron-core is imported that other versions lack.

    Raises:
        MissingExtraError: the installed version is not supported.
    """
    lowest, above = SUPPORTED
    numbers = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
    if not lowest <= numbers < above:
        raise MissingExtraError(
            f"Megatron-core {megatron.core.__version__} is not supported: run `pip install '{SUPPORTED_PACKAGE}'`",
            object_id="megatron-core",
        )
