"""A folder whose `current` is the newest version of a branch as safetensors, for engines that read only files. See `FollowedFolder`.

Each version is a folder of its own, complete before `current`, a link, is renamed to it. The tensors of the current version are mapped,
privately, and followed like a model's, so that only what changed is read from the store.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.descriptors import closing_fd, sync_path
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import AlreadyExistsError, MismatchError, UnsupportedValueError
from tensorstore_ck.feed import Feed, FeedVersion
from tensorstore_ck.format.record import STORE_KEY
from tensorstore_ck.format.tree import Tree, leaves, parse
from tensorstore_ck.integrations.exporting.atomic_target import AtomicTarget, atomic_folder, require_disk_space
from tensorstore_ck.integrations.exporting.export_snapshot import MAX_FILE_BYTES, chosen
from tensorstore_ck.integrations.exporting.job import ExportJob
from tensorstore_ck.integrations.exporting.model_folder import (
    ModelFiles,
    find_model_files,
    weights_globs,
    without_model_files,
    write_model_folder,
)
from tensorstore_ck.integrations.exporting.output_file import OutputFile, write_file
from tensorstore_ck.integrations.exporting.safetensors_files import write_safetensors
from tensorstore_ck.integrations.exporting.strip_prefix import sole_prefix, without_prefix
from tensorstore_ck.integrations.model_file_names import ADAPTER_CONFIG, CONFIG, stored_files
from tensorstore_ck.integrations.safetensors_format import METADATA, TORCH_DTYPES
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked
from tensorstore_ck.state.byte_sources import memory_at
from tensorstore_ck.state.registered_types import torch_dtype
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import open_content, resolve

CURRENT: Final = "current"
VERSION: Final = "version.json"
LOCK: Final = ".lock"
KEPT: Final = 2
"""Versions in the folder: an engine may still read the one before the current one."""
_VERSION: Final = re.compile(r"[0-9a-f]{32}")
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{12}\.part(\.old)?")
"""What a process that was killed leaves of a version: see `atomic_folder`."""
_TORCH_NAMES: Final = {name: torch_name for torch_name, name in TORCH_DTYPES.items()}


class _Plan(NamedTuple):
    tree: Tree
    globs: Sequence[str] | None
    prefix: str
    """What stored names begin with, and those in the files do not."""
    model: ModelFiles | None
    """The small files; None without a configuration."""


@short_errors
class FollowedFolder:
    """Keeps a folder at the newest version of a branch. `update` looks once."""

    def __init__(
        self, store: ReadOnlyStore, ref: str, folder: str, *, select: Sequence[str] | None = None, config_from: str | None = None
    ) -> None:
        """Args:
            store: An open store; it is only read.
            ref: The branch.
            folder: Where the versions go; made if it is missing.
            select: Globs over names; by default the weights, as for an export with ``format="hf"``.
            config_from: See `export_snapshot`; by default the small files come from the snapshot, where it has them.

        Raises:
            AlreadyExistsError: the folder has something named ``current`` that is no link.
        """
        self._store, self._ref, self._folder = store, ref, os.path.abspath(local_path(folder, "folder"))
        self._select, self._config_from = None if select is None else list(select), config_from
        self._files: dict[str, np.memmap[Any, Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._feed: Feed | None = None
        self._prefix = ""
        with os_errors("write", folder):
            os.makedirs(self._folder, exist_ok=True)
        link = os.path.join(self._folder, CURRENT)
        if os.path.lexists(link) and not os.path.islink(link):
            raise AlreadyExistsError(f"{link} exists and is no link: choose another folder", object_id=link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    @property
    def root(self) -> str | None:
        """The root of the version that ``current`` is; None if there is none."""
        with suppress(OSError, ValueError), open(os.path.join(self._folder, CURRENT, VERSION), "rb") as file:
            match parse_json(file.read()):
                case {"root": str(root)}:
                    return root
        return None

    def update(self) -> Snapshot | None:
        """Makes ``current`` the newest version, and returns its snapshot; None if it is that already.

        Waits while another process updates the folder.

        Raises:
            NotFoundError: the branch does not exist, or was removed.
            SnapshotMarkedBadError: the snapshot is marked.
            MismatchError: the tensors are no model that transformers loads, where the folder has a configuration.
            NoSpaceError: the files do not fit.
            StoreError: see `export_snapshot`. ``current`` is what it was.
        """
        with _locked(self._folder) as is_locked:
            if is_locked:
                self._remove_if(_UNFINISHED.fullmatch)
            return self._update()

    def _update(self) -> Snapshot | None:
        while True:
            info = resolve(self._store, self._ref).info
            snapshot = Snapshot.from_info(info)
            name = self._name_of(snapshot.root)
            if snapshot.root == self.root and name == self._current():
                return None
            refuse_marked(snapshot, self._ref, "move the branch to it")
            content = open_content(self._store, info)
            plan = self._plan(content)
            target = AtomicTarget(os.path.join(self._folder, name), is_file=False, others=re.compile(".*"))
            if os.path.exists(os.path.join(target.path, VERSION)):  # the branch was moved back
                self._forget()  # the feed takes the mapped tensors for the version before
                break
            followed = self._follow(plan)
            if followed is None or followed.root == snapshot.root:
                self._write(content, plan, snapshot, target, is_mapped=followed is not None)
                break
        self._publish(name)
        self._map(plan.prefix)
        return snapshot

    def _name_of(self, root: str) -> str:
        """The folder of a version: another one where what goes into it was chosen differently."""
        if self._select is None and self._config_from is None:
            return root[:32]
        return hashlib.sha256(json.dumps([root, self._select, self._config_from]).encode()).hexdigest()[:32]

    def _current(self) -> str:
        """The name of the folder that ``current`` leads to; '' without one."""
        link = os.path.join(self._folder, CURRENT)
        return os.path.basename(os.readlink(link)) if os.path.lexists(link) else ""

    def _write(self, content: SnapshotContent, plan: _Plan, snapshot: Snapshot, target: AtomicTarget, *, is_mapped: bool) -> None:
        """Writes the folder of a version; `is_mapped`: the mapped tensors are that version."""
        with atomic_folder(target, overwrite=True) as folder:
            metadata = {key: value for key, value in self._store.metadata(snapshot.root).items() if key != STORE_KEY}
            job = ExportJob(content, plan.tree, metadata, folder, target=target, max_file_bytes=MAX_FILE_BYTES, with_values=False)
            if is_mapped:
                self._write_mapped(job, plan)
            elif plan.model is None:
                write_safetensors(job)
            else:
                write_model_folder(job, plan.model)
            version = {"root": snapshot.root, "step": snapshot.step, "ref": self._ref, "time_ns": snapshot.time_ns}
            write_file(os.path.join(folder, VERSION), target.path, json.dumps(version).encode() + b"\n")

    def _plan(self, content: SnapshotContent) -> _Plan:
        tree = parse(content.layout, len(content.values))
        has_files = self._config_from is not None or not {CONFIG, ADAPTER_CONFIG}.isdisjoint(stored_files(tree))
        model = find_model_files(content, tree, self._config_from) if has_files else None
        tree = without_model_files(tree)
        globs = weights_globs(tree) if self._select is None else self._select
        tree = chosen(tree, globs)
        prefix = sole_prefix(tree)
        tree = without_prefix(tree, prefix)
        if model is not None and model.is_adapter:
            raise UnsupportedValueError(
                f"{self._ref} is an adapter of peft: export its versions with `tsck export --to hf`", object_id=self._ref
            )
        return _Plan(tree, globs, prefix, model)

    def _follow(self, plan: _Plan) -> FeedVersion | None:
        """Makes the mapped tensors the newest version and returns it; None if none are mapped, or they are not those of the snapshot."""
        if not self._files and self.root is not None:
            self._map(plan.prefix)
        if self._files and plan.prefix == self._prefix and self._tensors.keys() <= {leaf.path for leaf in leaves(plan.tree)}:
            if self._feed is None:
                without_prefix_of_plan = methodcaller("removeprefix", plan.prefix)
                self._feed = self._store.follow(self._ref, into=self._tensors, select=plan.globs, rename=without_prefix_of_plan)
            with suppress(MismatchError, UnsupportedValueError):
                self._feed.poll()
                self._feed.swap()
                return self._feed.version
        self._forget()
        return None

    def _write_mapped(self, job: ExportJob, plan: _Plan) -> None:
        require_disk_space(job.folder, sum(data.nbytes for data in self._files.values()), job.target.path)
        for name, data in self._files.items():
            _write_with_header(job, name, data)
        for name, text in (plan.model.files if plan.model is not None else {}).items():
            write_file(os.path.join(job.folder, name), job.target.path, text)
        with os_errors("write", job.target.path, job.folder):
            for name in os.listdir(os.path.join(self._folder, CURRENT)):
                if name.endswith(".safetensors.index.json"):
                    shutil.copyfile(os.path.join(self._folder, CURRENT, name), os.path.join(job.folder, name))

    def _publish(self, name: str) -> None:
        """Lets ``current`` be the version `name`, and removes old ones."""
        link = os.path.join(self._folder, CURRENT)
        with os_errors("write", link, self._folder):
            former = self._current()
            with suppress(FileNotFoundError):
                os.unlink(f"{link}.part")
            os.symlink(name, f"{link}.part")
            os.replace(f"{link}.part", link)
            sync_path(self._folder)
            self._remove_if(lambda other: _VERSION.fullmatch(other) and other not in (name, former))

    def _remove_if(self, is_old: Callable[[str], object]) -> None:
        with os_errors("list", self._folder):
            for name in filter(is_old, os.listdir(self._folder)):
                shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)

    def _map(self, prefix: str) -> None:
        """Maps the tensors of the current version; what a feed changes in them never reaches the files."""
        folder = os.path.realpath(os.path.join(self._folder, CURRENT))
        self._prefix = prefix
        self._files.clear()
        self._tensors.clear()
        try:
            for name in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
                data = np.memmap(os.path.join(folder, name), np.uint8, "c")
                table, start = _header_of(data)
                self._tensors |= {key: _tensor_at(data, start, entry) for key, entry in table.items() if key != METADATA}
                self._files[name] = data
        except (OSError, ValueError, KeyError, RuntimeError):  # everything is read from the store
            self._forget()

    def _forget(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._feed = None
        self._tensors.clear()
        self._files.clear()


@contextmanager
def _locked(folder: str) -> Iterator[bool]:
    """Waits until no other process updates the folder. False: this filesystem has no locks, so another process may."""
    with os_errors("write", folder):
        fd = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # NFS locks no file that is only read
    with closing_fd(fd):
        is_locked = False
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            is_locked = True
        try:
            yield is_locked
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, and so the lock


def _header_of(data: "np.memmap[Any, Any]") -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin."""
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return parse_json(data[8:start].tobytes()), start


def _tensor_at(data: "np.memmap[Any, Any]", start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    first, last = entry["data_offsets"]
    dtype = torch_dtype(_TORCH_NAMES[entry["dtype"]])
    if first == last:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.from_numpy(data[start + first : start + last]).view(dtype).view(entry["shape"])


def _write_with_header(job: ExportJob, name: str, data: "np.memmap[Any, Any]") -> None:
    table, start = _header_of(data)
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in job.metadata.items()}
    table[METADATA] = {**texts, "format": "pt"}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * (-len(text) % 8)
    with OutputFile(os.path.join(job.folder, name), job.target.path) as file:
        file.write(0, len(text).to_bytes(8, "little") + text)
        if data.nbytes > start:
            file.write(8 + len(text), memory_at(data.ctypes.data + start, data.nbytes - start))
        file.finish(8 + len(text) + data.nbytes - start)
