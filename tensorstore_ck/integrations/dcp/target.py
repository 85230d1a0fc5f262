"""The store, ref, step and address of a `Writer` or `Reader`, from its arguments and DCP's checkpoint id."""

import os
import re
from typing import Any, Final

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.store import OpenOptions, ReadOnlyStore, open_store

CheckpointId = str | os.PathLike[str] | None
_NUMBER: Final = re.compile(r"([0-9]{1,18})/?$")


class DcpTarget:
    """A store, opened on first use, and a ref or address in it. Picklable if the store was given by URL."""

    def __init__(self, store: str | os.PathLike[str] | ReadOnlyStore, name: str | None, options: OpenOptions) -> None:
        if options and not isinstance(store, str | os.PathLike):
            raise InvalidOptionError(f"the store is already open, so {', '.join(options)} has no effect", object_id=next(iter(options)))
        self._url = os.fspath(store) if isinstance(store, str | os.PathLike) else None
        self._options = options
        self._store = None if isinstance(store, str | os.PathLike) else store
        self._name = name

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the store itself."""
        if self._url is None:
            raise InvalidOptionError(
                "an open Store cannot go to another process: give the Writer the store's URL for AsyncCheckpointerType.PROCESS",
                object_id="storage_writer",
            )
        return {**vars(self), "_store": None}

    @property
    def store(self) -> ReadOnlyStore:
        """The open store."""
        if self._store is None:
            assert self._url is not None
            self._store = open_store(self._url, **self._options)  # type: ignore[call-overload]  # read_only may be either
        return self._store

    @property
    def is_shared(self) -> bool:
        """Whether the caller opened the store."""
        return self._url is None

    def ref_and_step(self, checkpoint_id: CheckpointId) -> tuple[str, int | None]:
        """The ref and step to save to. Raises `InvalidOptionError` if they are not given."""
        if self._name is not None:
            number = _NUMBER.search("" if checkpoint_id is None else os.fspath(checkpoint_id))
            return self._name, None if number is None else int(number[1])
        ref, at, step = _needed(checkpoint_id, "ref=").partition("@")
        if at and not (step.isascii() and step.isdigit()):
            raise InvalidOptionError(f"checkpoint_id={checkpoint_id!r}: the part after @ must be a step", object_id="checkpoint_id")
        return ref, int(step) if at else None

    def address(self, checkpoint_id: CheckpointId) -> str:
        """The address to read. Raises `InvalidOptionError` if it is not given."""
        if self._name is None:
            return _needed(checkpoint_id, "address=")
        number = _NUMBER.search("" if checkpoint_id is None else os.fspath(checkpoint_id))
        return self._name if number is None else f"{self._name}@{int(number[1])}"


def _needed(checkpoint_id: CheckpointId, option: str) -> str:
    if checkpoint_id is None:
        raise InvalidOptionError(f"which snapshot? Pass {option}, or a checkpoint_id such as 'runs/gpt@1000'", object_id=option)
    return os.fspath(checkpoint_id)
