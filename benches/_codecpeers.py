"""What else could keep the same states: compressors on the bytes of each, backup programs on its file."""

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

State = dict[str, Any]


class Peer(ABC):
    """Keeps states in a folder; `add` says by how many bytes it grew."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    @abstractmethod
    def add(self, folder: Path, state: State, step: int) -> int:
        """Takes in another state."""


class Compressor(Peer):
    """Compresses all tensors of a state, each by itself."""

    def __init__(self, name: str, compress: Callable[[torch.Tensor], int]) -> None:
        super().__init__(name)
        self._compress = compress

    def add(self, folder: Path, state: State, step: int) -> int:
        return sum(self._compress(tensor) for tensor in _tensors(state))


class Backup(Peer):
    """A backup program, on a file by torch.save that is overwritten."""

    def __init__(self, name: str, begin: list[str], add: list[str]) -> None:
        super().__init__(name)
        self._begin, self._add = begin, add

    def begin(self, folder: Path) -> None:
        super().begin(folder)
        self._run(self._begin, folder, 0)

    def add(self, folder: Path, state: State, step: int) -> int:
        before = _size(folder / "repo")
        torch.save(state, folder / "state.pt")
        self._run(self._add, folder, step)
        return _size(folder / "repo") - before

    @staticmethod
    def _run(command: list[str], folder: Path, step: int) -> None:
        here = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment = here | {"RESTIC_PASSWORD": "bench", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes", "HOME": str(folder)}
        words = [word.format(step=step) for word in command]
        subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for item in value.values() for each in _tensors(item)] if isinstance(value, dict) else []


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _zstd(level: int) -> Callable[[torch.Tensor], int]:
    return lambda tensor: len(zstandard.ZstdCompressor(level=level).compress(_bytes(tensor)))


def _zipnn(tensor: torch.Tensor) -> int:
    from zipnn import ZipNN  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: PLC0415 - not needed elsewhere

    dtype = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}.get(tensor.dtype)
    data = _bytes(tensor)
    return len(ZipNN(bytearray_dtype=dtype).compress(data)) if dtype and len(data) > 1024 else len(data)


def _blosc2(tensor: torch.Tensor) -> int:
    import blosc2  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: PLC0415 - as above

    return len(
        blosc2.compress2(
            _bytes(tensor), typesize=tensor.element_size(), codec=blosc2.Codec.ZSTD, clevel=5, filters=[blosc2.Filter.BITSHUFFLE]
        )
    )


PEERS: list[Peer] = [
    Compressor("zstd -1", _zstd(1)),
    Compressor("zstd -3", _zstd(3)),
    Compressor("ZipNN", _zipnn),
    Compressor("blosc2 bitshuffle+zstd", _blosc2),
    Backup("restic", ["restic", "init", "-r", "repo"], ["restic", "backup", "-r", "repo", "--compression", "max", "state.pt"]),
    Backup("borg zstd,3", ["borg", "init", "-e", "none", "repo"], ["borg", "create", "-C", "zstd,3", "repo::{step}", "state.pt"]),
]
