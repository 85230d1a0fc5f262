"""Tensors of which the user says that they do not change: they are captured without a copy, and not read at each put.

What is known of one counts for the very same memory only, which is kept alive so that nothing else can come to lie there: another state
with the same names, or another share of a tensor, is read.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, FrozenTensor

VERIFY_EVERY: Final = 10
"""Each so-manieth put reads a frozen tensor all the same."""


class _FrozenTensor(NamedTuple):
    place: tuple[object, ...]
    """What it must be, for `frozen` to count."""
    frozen: FrozenTensor
    source: ByteSource
    """Keeps the memory alive."""


class FrozenTensors:
    """What one store handle has learnt of them."""

    def __init__(self) -> None:
        self._known: dict[str, _FrozenTensor] = {}

    def mark(self, captured: CapturedState, globs: Sequence[str], scope: bytes = b"") -> CapturedState:
        """The same, with those tensors marked whose names fit. `scope`: with whom it is put.

        Raises:
            InvalidOptionError: `globs` are none.
        """
        if not globs:
            return captured
        from tensorstore_ck.state.capture_copy import memory_key  # noqa: PLC0415 - loads torch
        from tensorstore_ck.state.select import Selection  # noqa: PLC0415 - loads torch

        selection, frozen = Selection(globs), dict[int, FrozenTensor]()
        for number, spec in enumerate(captured.layout.tensors):
            if not selection.fits(spec.name):
                continue
            source = captured.sources[number]
            place = (scope, spec, *memory_key(source))
            known = self._known.get(spec.name)
            if known is None or known.place != place:
                known = self._known[spec.name] = _FrozenTensor(place, FrozenTensor(VERIFY_EVERY), source)
            frozen[number] = known.frozen
        return captured._replace(frozen=frozen)

    def forget(self) -> None:
        """Tensors were filled anew: what is known of them does not count any more."""
        self._known.clear()
