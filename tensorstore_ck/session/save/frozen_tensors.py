"""Tensors that the user declared frozen: they are captured without a copy, and not read at each save.

Knowledge of a tensor is valid for the same memory only, which is kept alive so that nothing else can be allocated there. Another state with
the same names, or another shard of a tensor, is read.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, FrozenTensor

VERIFY_EVERY: Final = 10
"""Every N-th save reads a frozen tensor anyway."""


class _FrozenTensor(NamedTuple):
    place: tuple[object, ...]
    """Identifies the memory for which `frozen` holds."""
    frozen: FrozenTensor
    source: ByteSource
    """Keeps the memory alive."""


class FrozenTensors:
    """The frozen tensors of one store handle."""

    def __init__(self) -> None:
        self.known: dict[str, _FrozenTensor] = {}
        """Tensor's name -> what is known of it."""

    def mark(self, captured: CapturedState, globs: Sequence[str], scope: bytes = b"") -> CapturedState:
        """The state with the tensors marked as frozen whose names match. `scope`: the group that saves it.

        Forgets all other tensors: a tensor that is frozen, then trained, then frozen again is read.

        Raises:
            InvalidOptionError: `globs` are invalid.
        """
        from tensorstore_ck.state.capture_copy import memory_key  # noqa: PLC0415 - loads torch
        from tensorstore_ck.state.select import Selection  # noqa: PLC0415 - loads torch

        selection, frozen = Selection(globs) if globs else None, dict[int, FrozenTensor]()
        for number, spec in enumerate(captured.layout.tensors):
            if selection is None or not selection.fits(spec.name):
                self.known.pop(spec.name, None)
                continue
            source = captured.sources[number]
            place = (scope, spec, *memory_key(source))
            known = self.known.get(spec.name)
            if known is None or known.place != place:
                known = self.known[spec.name] = _FrozenTensor(place, FrozenTensor(VERIFY_EVERY), source)
            frozen[number] = known.frozen
        return captured._replace(frozen=frozen)
