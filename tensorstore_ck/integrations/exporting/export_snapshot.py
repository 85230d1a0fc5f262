"""Exports a snapshot as files that other programs read. See `export_snapshot`."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import InvalidOptionError, MismatchError, NotFoundError
from tensorstore_ck.format.record import STORE_KEY
from tensorstore_ck.format.tree import Container, Leaf, Tree, parse
from tensorstore_ck.integrations.exporting import model_folder, safetensors_files, torch_file
from tensorstore_ck.integrations.exporting.atomic_target import AtomicTarget, atomic_folder, target_of
from tensorstore_ck.integrations.exporting.blocks_to_files import read_or_copy
from tensorstore_ck.integrations.exporting.deepspeed_universal import write_universal
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.strip_prefix import sole_prefix, without_prefix
from tensorstore_ck.integrations.model_file_names import USUAL_FILE
from tensorstore_ck.integrations.model_signature import SUFFIX, FolderSigner, write_signature
from tensorstore_ck.integrations.weight_names import read_names
from tensorstore_ck.integrations.weight_names.content import convert_content
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked
from tensorstore_ck.state.rebuild_tree import UNSELECTED
from tensorstore_ck.state.select import Selection
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import open_content, require_opened, resolve

Format = Literal["dcp", "deepspeed-universal", "hf", "megatron", "safetensors", "torch"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
MAX_FILE_BYTES: Final = 5_000_000_000
"""The size at which Hugging Face splits models."""
_MEGATRON_FILE: Final = re.compile(r"common\.pt|metadata\.json")
Writer = Callable[[ExportJob], WrittenExport]


class ExportedFile(NamedTuple):
    """A written file."""

    name: str
    """Its name in the target folder, or that of the target file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The files that an export wrote. Every byte was read back and compared, and is durable."""

    format: str
    path: str
    snapshot: Snapshot
    files: tuple[ExportedFile, ...]
    tensors: int
    """Names of tensors and arrays in the files, including those that share memory."""
    tensor_bytes: int
    left_out: Mapping[str, str]
    """Path in the state -> why the format does not hold it."""
    notes: tuple[str, ...]
    """Hints for readers of the files."""
    signature: str = ""
    """The path of the signature; empty: none was asked for."""

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)


@short_errors
@renamed_argument(skip="exclude", allow_bad="allow_marked")
def export_snapshot(
    store: ReadOnlyStore,
    address: str,
    path: str | os.PathLike[str],
    *,
    format: Format,  # noqa: A002 - what users call it
    select: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    strip_prefix: str | None = None,
    names: str | os.PathLike[str] | None = None,
    config_from: str | os.PathLike[str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    allow_marked: bool = False,
    sign: str | os.PathLike[str] | None = None,
) -> ExportReport:
    """Writes the snapshot at `address` as files of another program, within bounded memory.

    Verifies every block that it reads, and reads back and compares every byte of the files. Writes under a temporary name next to `path`,
    and renames when the files are complete and durable: `path` is always either complete or unchanged.

    Args:
        store: An open store.
        address: See `Store.checkout`.
        path: The folder to create; or a single file, if it ends in ``.safetensors``, ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``.
        format: ``safetensors``: tensors by name. ``torch``: everything, for `torch.load`. ``dcp``: for `torch.distributed.checkpoint`.
            ``megatron``: a snapshot of `tensorstore_ck.megatron`, or an imported folder, for Megatron-core's `dist_checkpointing.load`.
            ``hf``: the model with configuration and tokenizer, for `from_pretrained` of transformers, or an adapter for that of peft; it
            is tried, and `notes` says the result. ``deepspeed-universal``: a snapshot of `tensorstore_ck.deepspeed`, or an imported
            folder, for stock DeepSpeed with ``load_universal``.
        select: Globs over names such as ``model.*``: export only what matches.
        exclude: Globs over names: export everything else.
        strip_prefix: Remove this from all names, such as ``model.``. With ``hf``, by default, what the names of the weights have in common.
        names: A file of weight names: export the tensors of a model of Megatron-core under the names of Hugging Face, or the other way
            round, and nothing else. See the guide "Import and export".
        config_from: With ``hf``: a folder, or a name on the Hugging Face hub, with configuration and tokenizer. By default they come from
            the snapshot, where `tensorstore_ck.hf.Trainer` saves them.
        max_file_bytes: Split larger files of a folder, between tensors. A torch file is never split.
        overwrite: Replace an earlier export.
        allow_marked: Export even a snapshot that is marked ``bad`` or ``damaged``.
        sign: The file of an EC key, which signs the files of a folder: ``PATH.sig`` is then a signature as `model-signing` 1.x verifies it.

    Raises:
        AlreadyExistsError: `path` exists, and `overwrite` is false, or it is no export.
        UnsupportedValueError: the format cannot hold something, which the message names; nothing was written.
        MismatchError: a glob matches nothing, a name lacks the prefix, `names` does not fit the tensors, or the model does not load;
            nothing was written.
        NotFoundError: with ``hf``: there is no configuration.
        SnapshotMarkedBadError: the snapshot is marked.
        DamageError: stored data is damaged; nothing was left behind.
        NoSpaceError: the files do not fit.
    """
    require_opened(store)
    target = _target(path, format, max_file_bytes)
    if config_from is not None and format != "hf":
        raise InvalidOptionError(f"config_from= (--config-from) is for the format hf, not {format}", object_id="config_from")
    if sign is not None and target.is_file:
        raise InvalidOptionError(f"{target.path} is one file, and sign= (--sign) is for folders: export into a folder", object_id="sign")
    signer = None if sign is None else FolderSigner(sign)
    target.check(overwrite=overwrite)
    info = resolve(store, address).info
    snapshot = Snapshot.from_info(info)
    if not allow_marked:
        refuse_marked(snapshot, address, "pass allow_marked=True (--allow-marked)")
    content: SnapshotContent = open_content(store, info, read=read_or_copy)
    config = None if config_from is None else os.fspath(config_from)
    tree, write = _plan(content, format=format, select=select, exclude=exclude, prefix=strip_prefix, config_from=config)
    others: list[str] = []
    if names is not None:
        content, tree, others = convert_content(read_names(names), content, tree)
    metadata = store.metadata(snapshot.root)
    metadata.pop(STORE_KEY, None)  # the store's own note
    with atomic_folder(target, overwrite=overwrite) as folder:
        rank_state = partial(_first_rank_state, store, snapshot.root)
        job = ExportJob(content, tree, metadata, folder, target=target, max_file_bytes=max_file_bytes, rank_state=rank_state)
        written = write(job)
        files = tuple(sorted(_files(folder)))
        bundle = None if signer is None else signer.sign(folder, os.path.basename(target.path))
    if bundle is not None:
        write_signature(target.path + SUFFIX, bundle)
    return ExportReport(
        format=format,
        path=target.path,
        snapshot=snapshot,
        files=files,
        tensors=written.tensors,
        tensor_bytes=written.tensor_bytes,
        left_out=written.left_out | dict.fromkeys(others, "not a tensor"),
        notes=tuple(written.notes),
        signature="" if bundle is None else target.path + SUFFIX,
    )


def _first_rank_state(store: ReadOnlyStore, root: str) -> Any:
    """The state that the first rank saved as its own; an empty dict if there is none."""
    try:
        return store.rank_state(root, 0)
    except NotFoundError:
        return {}


def _files(folder: str) -> Iterator[ExportedFile]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            yield ExportedFile(os.path.relpath(path, folder), os.stat(path).st_size)


def _target(path: str | os.PathLike[str], format: str, max_file_bytes: int) -> AtomicTarget:  # noqa: A002
    if format not in FORMATS:
        raise InvalidOptionError(f"format must be one of {', '.join(FORMATS)}, not {format!r}", object_id="format")
    if max_file_bytes < 1:
        raise InvalidOptionError(f"max_file_bytes must be at least 1, not {max_file_bytes}", object_id="max_file_bytes")
    suffixes = {"safetensors": safetensors_files.SUFFIXES, "torch": torch_file.SUFFIXES}.get(format, ())
    return target_of(path, suffixes)._replace(others={"hf": USUAL_FILE, "megatron": _MEGATRON_FILE}.get(format))


def _plan(  # noqa: PLR0917 - of `export_snapshot`
    content: SnapshotContent,
    format: Format,  # noqa: A002
    select: Sequence[str] | None,
    exclude: Sequence[str],
    prefix: str | None,
    config_from: str | None,
) -> tuple[Tree, Writer]:
    """The content to export, and the function that writes it."""
    tree = parse(content.layout, len(content.values))
    if format != "hf":
        return without_prefix(chosen(tree, select, exclude), prefix or ""), _writer(format)
    model = model_folder.find_model_files(content, tree, config_from)
    tree = model_folder.without_model_files(tree)
    tree = chosen(tree, model_folder.weights_globs(tree) if select is None else select, exclude)
    tree = without_prefix(tree, sole_prefix(tree) if prefix is None else prefix)
    if model.is_adapter:
        tree = model_folder.adapter_weights(tree, model.adapter_names)
    return tree, partial(model_folder.write_model_folder, model=model)


def _writer(format: Format) -> Writer:  # noqa: A002
    if format == "torch":
        return torch_file.write_torch
    if format == "safetensors":
        return safetensors_files.write_safetensors
    if format == "megatron":
        from tensorstore_ck.integrations.exporting.megatron_folder import write_megatron  # noqa: PLC0415 - loads torch.distributed

        return write_megatron
    if format == "deepspeed-universal":
        return write_universal
    from tensorstore_ck.integrations.exporting.dcp_folder import write_dcp  # noqa: PLC0415 - loads torch.distributed

    return write_dcp


def chosen(tree: Tree, select: Sequence[str] | None, exclude: Sequence[str] = ()) -> Tree:
    """The selected part of a state, without the excluded part. Raises `MismatchError` if a glob matches nothing, or nothing is left."""
    if select is not None:
        selection = Selection(select)
        selection.require_used(tree)
        tree = selection.prune(tree) or tree
    if exclude:
        Selection(exclude).require_used(tree)
        globs = [exclude] if isinstance(exclude, str) else exclude
        patterns = re.compile("|".join(f"(?:{fnmatch.translate(glob)}|{fnmatch.translate(glob + '.*')})" for glob in globs))
        left = _without(tree, patterns)
        if left is None:
            raise MismatchError("nothing is left to export: --exclude (exclude=) matches everything", object_id="exclude")
        tree = left
    return tree


def _without(tree: Tree, excluded: re.Pattern[str]) -> Tree | None:
    """The inverse of `Selection.prune`: drops dict entries; elements of lists and tuples become None."""
    if isinstance(tree, Leaf):
        return None if tree is not UNSELECTED and excluded.match(tree.path) else tree
    if not tree.children:
        return None if excluded.match(tree.path) else tree
    kept = [_without(child, excluded) for child in tree.children]
    if not any(kept):
        return None
    if all(one is other for one, other in zip(kept, tree.children, strict=True)):
        return tree
    if tree.node[0] in ("l", "u", "n"):
        return Container(node=tree.node, path=tree.path, keys=tree.keys, children=[child or UNSELECTED for child in kept], attributes=None)
    if tree.node[0] == "r":
        return tree  # cannot be split
    keys = [key for key, child in zip(tree.keys, kept, strict=True) if child]
    return Container(node=tree.node, path=tree.path, keys=keys, children=[child for child in kept if child], attributes=tree.attributes)
