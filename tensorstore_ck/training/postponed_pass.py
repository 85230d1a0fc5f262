"""The pass in which a restored StatefulDataLoader continues. Knows no ranks and no store."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from torch.utils.data import DataLoader

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.training import random_generators
from tensorstore_ck.training.stateful_parts import load

_ATTRIBUTES: Final = {"next_iter_state", "_iterator", "_initial_iter_for_state_dict"}
"""Of torchdata's loader, without which a pass cannot be postponed. A loader that wraps one has none of its own."""


def begin_pass(path: str, loader: "DataLoader[Any]") -> None:
    """Makes the iterator of a loader that has loaded its state. That may draw from generators.

    A script calls `set_epoch` before it begins to read, so where something has one, the iterator is made when the script reads.

    Raises:
        MismatchError: the loader does not fit the state.
    """
    batches = loader.batch_sampler
    ordering = (loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset)
    if vars(loader).keys() >= _ATTRIBUTES and any(hasattr(one, "set_epoch") for one in ordering):
        load(path, partial(_postpone, path, any(hasattr(one, "load_state_dict") for one in ordering)), loader)
    else:
        load(path, lambda _: loader.state_dict(), None)  # type: ignore[attr-defined]


def _postpone(path: str, has_state: bool, loader: Any) -> None:
    """`has_state`: a sampler or the dataset gets its state with an iterator, and the script may ask it for its epoch before it reads."""
    state = loader.next_iter_state
    if state is None:
        return
    saved = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
    if saved != loader.num_workers:
        raise MismatchError(
            f"{path} has num_workers={loader.num_workers}, and the saved one had {saved}: create it with num_workers={saved}",
            object_id=path,
        )
    if has_state:
        loader._get_iterator()
    loader._iterator, loader._initial_iter_for_state_dict, loader.next_iter_state = _PostponedPass(path, loader, state), True, None


class _PostponedPass:
    """The iterator of a loader, which makes the real one at the first use and leaves no trace of that in a generator.

    As an object of its own, it may be copied and pickled with its loader.
    """

    def __init__(self, path: str, loader: Any, state: Any) -> None:
        self._path = path
        self._loader = loader
        self._state = state
        self._real: Any = None

    def state_dict(self) -> Any:
        return self._state if self._real is None else self._real.state_dict()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._made())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for their methods
            raise AttributeError(name)
        return getattr(self._made(), name)

    def _made(self) -> Any:
        if self._real is None:
            generator = self._loader.generator
            held = None if generator is None else generator.get_state()
            try:
                with random_generators.preserved():
                    load(self._path, self._make, self._state)
            finally:
                if held is not None:
                    generator.set_state(held)
        return self._real

    def _make(self, state: Any) -> None:
        loader = self._loader
        is_current, pending = loader._iterator is self, loader.next_iter_state
        loader.next_iter_state = state
        try:
            self._real = loader._get_iterator()
        finally:
            loader.next_iter_state = pending
            if is_current and self._real is None:
                loader._initial_iter_for_state_dict = True  # the next attempt fails too, and begins no other pass
        if is_current:
            loader._iterator = self._real
