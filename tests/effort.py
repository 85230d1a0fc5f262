"""How far tests go that could go on for ever: far enough for each change; and as far as ``make soak`` says, before a release."""

import os
from typing import Final, TypeVar

T = TypeVar("T")

SOAK: Final = bool(os.environ.get("SOAK"))


def effort(usual: T, soak: T) -> T:
    """One or the other."""
    return soak if SOAK else usual
