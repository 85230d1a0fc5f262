"""Model files as states, and states as model files: .safetensors, and what torch.save writes.

A file is untrusted: torch files are only loaded with ``weights_only=True``. A file is written under a temporary name in the target's
folder, made durable and then renamed, so the target is complete or unchanged. Loads torch; knows no store.
"""

import json
import mmap
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.descriptors import sync_path
from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.host_memory import require_memory
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    InvalidOptionError,
    MismatchError,
    NotFoundError,
    UnsupportedValueError,
)

if TYPE_CHECKING:
    import torch

TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX: Final = ".safetensors"


class LoadedFile(NamedTuple):
    """A model file as a state."""

    state: Any
    metadata: dict[str, str]
    """The metadata of a .safetensors file."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of its tensors; shared memory counts for each."""
        import torch  # noqa: PLC0415 - loads torch only where tensors are handled

        return sum(value.nbytes for _, value in _leaves(self.state, "") if isinstance(value, torch.Tensor))


def load_file(path: str) -> LoadedFile:
    """The state in a model file, its tensors mapped from the file rather than read.

    Raises:
        NotFoundError: no such file.
        InvalidOptionError: neither a .safetensors nor a torch file, by its name.
        CorruptObjectError: its content is not what its name says.
        UnsupportedValueError: it holds more than torch loads with ``weights_only=True``.
    """
    load, path = _load_safetensors if _is_safetensors(path) else _load_torch, local_path(path, "a model file")
    if not os.path.isfile(path):
        raise NotFoundError(f"there is no file {path}", object_id=path)
    with os_errors("read", path):
        return load(path)


def save_file(state: Any, path: str, metadata: Mapping[str, object], *, overwrite: bool) -> list[str]:
    """Writes a state durably, and returns the names of values that the format cannot hold.

    Raises:
        AlreadyExistsError: the file exists, and `overwrite` is false.
        UnsupportedValueError: a tensor's dtype does not exist in the format.
    """
    safetensors, path = _is_safetensors(path), local_path(path, "a model file")
    check_target(path, overwrite=overwrite)
    if safetensors:
        tensors, left_out = split_state(state)
        with _replacing(path) as temporary:
            _save_safetensors(tensors, temporary, path, metadata)
        return left_out
    import torch  # noqa: PLC0415 - loads torch only where tensors are handled

    with _replacing(path) as temporary, open(temporary, "wb") as file:
        output = _Output(file)
        try:
            torch.save(state, cast("IO[bytes]", output))
        except RuntimeError:
            if output.error is not None:
                raise output.error from None
            raise
    return []


def check_target(path: str, *, overwrite: bool) -> None:
    """Refuses a target that cannot be written, before any work is done.

    Raises:
        AlreadyExistsError: the file exists, and `overwrite` is false.
        NotFoundError: its folder does not exist.
        InvalidOptionError: its name has no known suffix.
    """
    _is_safetensors(path)
    check_new_file(path, overwrite=overwrite)


def check_new_file(path: str, *, overwrite: bool) -> None:
    """Refuses a file that is there, unless it is to be overwritten.

    Raises:
        AlreadyExistsError: the file exists, and `overwrite` is false.
        NotFoundError: its folder does not exist.
    """
    path = local_path(path, "a model file")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise NotFoundError(f"there is no folder {folder} to write {os.path.basename(path)} into", object_id=path)
    if os.path.isdir(path) or (os.path.lexists(path) and not overwrite):
        raise AlreadyExistsError(f"{path} is there already: give --force to overwrite it, or another name", object_id=path)


def tensor_bytes(path: str, name: str, dtype: str, shape: tuple[int, ...]) -> Buffer:
    """The bytes, row-major, of the tensor of this name in a model file; of any other file all its bytes.

    Raises:
        NotFoundError: no such file, or no such tensor in it.
        MismatchError: it has another dtype or shape.
    """
    if not os.path.isfile(path):
        raise NotFoundError(f"there is no file {path}", object_id=path)
    if not path.endswith((SAFETENSORS_SUFFIX, *TORCH_SUFFIXES)):
        with os_errors("read", path), open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if os.fstat(file.fileno()).st_size else b""
    import torch  # noqa: PLC0415 - loads torch only where tensors are handled

    tensors, _ = split_state(load_file(path).state)
    if name not in tensors:
        raise NotFoundError(f"{path} has no tensor {name!r}", object_id=name)
    tensor = tensors[name]
    form = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if form[1] != shape or (form[0] != dtype and not dtype.startswith("np:")):
        raise MismatchError(f"{name!r} is {form[0]} {form[1]} in {path}, and {dtype} {shape} in the snapshot", object_id=name)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def split_state(state: Any) -> tuple["dict[str, torch.Tensor]", list[str]]:
    """The tensors of a state by name (keys and positions joined by ``.``), and the names of everything else in it."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    tensors: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    for name, value in _leaves(state, ""):
        tensor = value
        if isinstance(value, np.ndarray):
            try:
                tensor = torch.from_numpy(value)
            except (TypeError, ValueError):  # a dtype that torch lacks, or negative strides
                tensor = None
        if isinstance(tensor, torch.Tensor) and name not in tensors:
            tensors[name] = tensor
        else:
            left_out.append(name)
    return tensors, left_out


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterator[tuple[object, Any]] = iter(value.items())
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _is_safetensors(path: str) -> bool:
    suffix = os.path.splitext(path)[1].lower()
    if suffix == SAFETENSORS_SUFFIX:
        return True
    if suffix in TORCH_SUFFIXES:
        return False
    known = ", ".join((SAFETENSORS_SUFFIX, *TORCH_SUFFIXES))
    raise InvalidOptionError(f"{path}: the name does not say which format it has; use one that ends in {known}", object_id=path)


def _safetensors() -> Any:
    with extra("safetensors", "reading or writing .safetensors"):
        import safetensors.torch  # noqa: PLC0415 - an extra
    return safetensors


def _load_safetensors(path: str) -> LoadedFile:
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt", device="cpu") as file:
            return LoadedFile({name: file.get_tensor(name) for name in file.keys()}, dict(sorted((file.metadata() or {}).items())))  # noqa: SIM118 - no mapping
    except library.SafetensorError as exc:
        raise CorruptObjectError(f"{path} is not a whole .safetensors file ({exc}): get it again", object_id=path) from exc


def _save_safetensors(tensors: "dict[str, torch.Tensor]", temporary: str, path: str, metadata: Mapping[str, object]) -> None:
    library = _safetensors()
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    try:
        library.torch.save_file(_apart(tensors), temporary, metadata={"format": "pt", **texts})
    except (KeyError, ValueError, TypeError, library.SafetensorError) as exc:
        if (failed := re.search(r"os error (\d+)", str(exc))) is not None:
            raise OSError(int(failed[1]), str(exc)) from exc
        raise UnsupportedValueError(f"{path} cannot hold these tensors ({exc}): write a .pt file instead", object_id=path) from exc


def _apart(tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Contiguous tensors with memory of their own: the format has no aliases.

    Raises:
        NoSpaceError: the copies need clearly more memory than is free: a view may repeat one stored number any number of times.
    """
    views = (tensor for tensor in tensors.values() if not tensor.is_contiguous())
    copied_bytes = sum(tensor.numel() * tensor.element_size() for tensor in views)
    require_memory(copied_bytes, "writing views as tensors of their own", "write a .pt file, which keeps views, or use --include")
    taken: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        if own.untyped_storage().data_ptr() in taken and own.numel():
            own = own.clone()
        taken.add(own.untyped_storage().data_ptr())
        apart[name] = own
    return apart


def _load_torch(path: str) -> LoadedFile:
    import pickle  # noqa: PLC0415 - for the name of the exception alone
    import zipfile  # noqa: PLC0415

    import torch  # noqa: PLC0415 - loads torch only where tensors are handled

    with open(path, "rb"):
        pass  # an unreadable file is not reported as damaged
    try:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are no zip files, and cannot be mapped
        return LoadedFile(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), {})
    except pickle.UnpicklingError as exc:
        raise UnsupportedValueError(_refused(path, str(exc)), object_id=path) from exc
    except Exception as exc:  # BLE: torch parses untrusted bytes in Python, and may raise any exception
        why = (str(exc) or type(exc).__name__).splitlines()[0]
        raise CorruptObjectError(f"{path} is not a whole torch file ({why}): save or get it again", object_id=path) from exc


def _refused(path: str, reason: str) -> str:
    match = re.search(r"GLOBAL (\S+)", reason) or re.search(r"WeightsUnpickler error: ([^\n]*)", reason)
    what = f" ({match[1]})" if match else ""
    return (
        f"{path} holds objects that could run code when they are loaded{what}, so only its author can vouch for it: "
        "load it where you trust it, and save state_dict()s and plain values alone; or put them from Python with put_snapshot"
    )


class _Output:
    """A file for torch.save, which raises a RuntimeError of its own when a write fails."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Buffer) -> int:
        """Writes all of `data`."""
        try:
            return self._file.write(data)
        except OSError as exc:
            self.error = exc
            raise

    def flush(self) -> None:
        """Nothing is kept back once the file is closed."""


@contextmanager
def _replacing(path: str) -> Iterator[str]:
    """A temporary name; the file written there replaces `path`, durably, when the block ends without an error."""
    folder = os.path.dirname(path) or "."
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(6)}")
    try:
        with os_errors("write", path, folder):
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            mode = os.fstat(descriptor).st_mode & 0o777
            os.close(descriptor)
            yield temporary
            with suppress(PermissionError):  # a filesystem without modes
                os.chmod(temporary, mode)  # safetensors replaces the file, with a mode for its owner only
            sync_path(temporary)
            os.replace(temporary, path)
            sync_path(folder)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
