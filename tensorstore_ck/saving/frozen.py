"""Tensors of which the user says that they do not change, by name: they are captured without a copy, and not read at each put."""

from collections.abc import Sequence
from typing import Final

from tensorstore_ck.layout import Captured, Frozen

VERIFY_EVERY: Final = 10
"""Each so-manieth put reads a frozen tensor all the same."""


class FrozenTensors:
    """What one store handle has learnt of them."""

    def __init__(self) -> None:
        self._known: dict[str, Frozen] = {}

    def mark(self, captured: Captured, globs: Sequence[str]) -> Captured:
        """The same, with those tensors marked whose names fit.

        Raises:
            InvalidOptionError: `globs` are none.
        """
        if not globs:
            return captured
        from tensorstore_ck.state.select import Selection  # noqa: PLC0415 - loads torch

        selection = Selection(globs)
        names = {number: spec.name for number, spec in enumerate(captured.layout.tensors) if selection.fits(spec.name)}
        return captured._replace(frozen={number: self._known.setdefault(name, Frozen(VERIFY_EVERY)) for number, name in names.items()})

    def forget(self) -> None:
        """Tensors were filled anew: what is known of them does not count any more."""
        self._known.clear()
