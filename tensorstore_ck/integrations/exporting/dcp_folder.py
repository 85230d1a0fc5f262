"""A snapshot as a checkpoint of torch.distributed.checkpoint, for `dcp.load` on any number of ranks.

DCP's own planner names and describes everything, torch pickles its metadata, and every tensor is one item, as `torch.save` writes it.
The report lists what DCP drops or changes.
"""

import io
import os
import pickle
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.tree import ATTRIBUTES, Container, Leaf, Tree, leaves
from tensorstore_ck.format.values import key_text
from tensorstore_ck.integrations.exporting.atomic_target import require_disk_space
from tensorstore_ck.integrations.exporting.byte_routing import ByteRouter, scratch_bytes, size_bytes
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport, split_files
from tensorstore_ck.integrations.exporting.meta_state import MetaState, untouched
from tensorstore_ck.integrations.exporting.output_file import OutputFile, write_file
from tensorstore_ck.integrations.exporting.torch_zip_template import TorchZipTemplate, build_template, require_savable
from tensorstore_ck.state.allocate import LeafForm, form_of
from tensorstore_ck.state.byte_sources import new_tensor

_DICTS: Final = frozenset("docf")
_BY_VALUE: Final = frozenset("unr")
"""DCP saves tuples, namedtuples and other objects as one value each, with their tensors."""


class _Tensor(NamedTuple):
    """A tensor's item: torch's file with gaps for the bytes."""

    leaf: Leaf
    form: LeafForm
    template: TorchZipTemplate


Item = tuple[WriteItem, _Tensor | bytes]


def write_dcp(job: ExportJob) -> WrittenExport:
    """Writes the checkpoint into the job's folder. Raises `UnsupportedValueError` if the state is no dict, or two names are one to DCP."""
    content, tree, target = job.content, job.tree, job.target
    if not isinstance(tree, Container) or tree.node[0] not in _DICTS:
        raise UnsupportedValueError(
            "DCP holds only dicts, and this state is not one: export as torch or safetensors", object_id=target.path
        )
    meta = MetaState(content, tree, _BY_VALUE)
    kept = write_checkpoint(job, meta, meta.state, DefaultSavePlanner())
    return WrittenExport(len(kept), sum(map(size_bytes, kept)), dict(_dropped(tree)), list(_notes(tree)))


def write_checkpoint(job: ExportJob, meta: MetaState, state: dict[Any, Any], planner: DefaultSavePlanner) -> list[LeafForm]:
    """Writes the files of a checkpoint of `state`, as DCP would get it; returns its tensors. `planner` names and describes its items.

    Raises:
        UnsupportedValueError: DCP cannot distinguish two of its names, or cannot hold a tensor.
    """
    content, folder, target = job.content, job.folder, job.target
    require_savable(((tensor, leaf.path) for tensor, leaf in meta.tensors.values()), target.path)
    plan, metadata = _plan(planner, state, target.path)
    items = list(_items(content, meta=meta, planner=planner, plan=plan, shown=target.path))
    scratch = scratch_bytes(content, (item.leaf for _, item in items if isinstance(item, _Tensor)))
    require_disk_space(folder, sum(map(_size, items)) + scratch, target.path)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for number, group in enumerate(split_files(items, _size, job.max_file_bytes)):
        name = f"__0_{number}.distcp"
        with OutputFile(os.path.join(folder, name), target.path, is_summed=True) as file:
            at = 0
            for item in group:
                storage[item[0].index] = _StorageInfo(name, at, _size(item))
                at += _size(item)
            _write_file(job, file, [(storage[write_item.index].offset, item) for write_item, item in group], at)
    metadata.storage_data, metadata.version = storage, CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta(checkpoint_id=os.path.abspath(target.path), save_id=str(uuid.uuid4()))
    write_file(os.path.join(folder, ".metadata"), target.path, pickle.dumps(metadata))
    return [item.form for _, item in items if isinstance(item, _Tensor)]


def _plan(planner: DefaultSavePlanner, state: Any, shown: str) -> tuple[SavePlan, Metadata]:
    try:
        planner.set_up_planner(state, is_coordinator=True)
        local = planner.create_local_plan()
        _require_sizes(local)
        (plan,), metadata = planner.create_global_plan([local])
    except ValueError as exc:
        raise UnsupportedValueError(
            f"DCP cannot hold this state ({exc}): its names are str(key) joined by dots, and two of them would be equal; exclude one with "
            "--exclude (exclude=), or export as torch",
            object_id=shown,
        ) from exc
    return plan, metadata


def _require_sizes(plan: SavePlan) -> None:
    """Rejects tensors of dtypes whose size DCP cannot determine."""
    unknown = []
    for item in plan.items:
        try:
            item.tensor_storage_size()
        except (TypeError, RuntimeError):
            unknown.append(f"{item.index.fqn} ({item.tensor_data.properties.dtype})" if item.tensor_data else item.index.fqn)
    if unknown:
        raise UnsupportedValueError(
            f"DCP cannot hold the dtype of {listed(unknown)}: leave it out with --exclude NAME (exclude=), or export as torch",
            object_id=unknown[0].partition(" ")[0],
        )


def _items(content: SnapshotContent, meta: MetaState, planner: DefaultSavePlanner, plan: SavePlan, shown: str) -> Iterator[Item]:
    templates: dict[tuple[tuple[int, ...], torch.dtype], TorchZipTemplate] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            try:
                data = planner.resolve_data(item)
            except RuntimeError as exc:  # such as tensors inside it that share memory as several dtypes
                message = f"torch cannot save {item.index.fqn}: {exc}; exclude it with --exclude (exclude=), or export as safetensors"
                raise UnsupportedValueError(message, object_id=item.index.fqn) from exc
            assert isinstance(data, io.BytesIO)
            yield item, data.getvalue()
            continue
        leaf = meta.tensors[id(planner.state_dict[item.index.fqn])][1]
        form = form_of(content.layout, leaf)
        assert isinstance(form.dtype, torch.dtype)
        if (form.shape, form.dtype) not in templates:
            with untouched():
                templates[form.shape, form.dtype] = build_template(new_tensor(form.shape, form.dtype, torch.device("cpu")), shown)
        yield item, _Tensor(leaf, form, templates[form.shape, form.dtype])


def _size(item: Item) -> int:
    return item[1].template.size_bytes if isinstance(item[1], _Tensor) else len(item[1])


def _write_file(job: ExportJob, file: OutputFile, items: Sequence[tuple[int, _Tensor | bytes]], size: int) -> None:
    """Writes items at their offsets: the tensors' bytes, then, with their CRC-32s, what torch writes around them."""
    router = ByteRouter(job.content)
    tensors = [(at, item) for at, item in items if isinstance(item, _Tensor)]
    for at, item in items:
        if not isinstance(item, _Tensor):
            file.write(at, item)
    for at, tensor in tensors:
        for gap in tensor.template.gaps:
            router.add_leaf(tensor.leaf, file, at + gap.offset)
    router.run(os.path.join(job.folder, "scratch"))
    regions = [range(at + gap.region.start, at + gap.region.stop) for at, tensor in tensors for gap in tensor.template.gaps]
    checksums = iter(file.read_back(regions))
    for at, tensor in tensors:
        for offset, data in tensor.template.sealed([next(checksums) for _ in tensor.template.gaps]):
            file.write(at + offset, data)
    file.finish(size, regions)


def _dropped(tree: Tree) -> Iterator[tuple[str, str]]:
    """The items that DCP drops: empty dicts, and attributes of an OrderedDict."""
    for container in _containers(tree):
        if container.node[0] in _DICTS and not container.children:
            yield container.path or ".", "an empty dict, which DCP drops"
        if container.attributes is not None:
            yield f"{container.path}.{ATTRIBUTES}" if container.path else ATTRIBUTES, "an attribute of an OrderedDict, which DCP drops"


def _notes(tree: Tree) -> Iterator[str]:
    all_dicts = [container for container in _containers(tree) if container.node[0] in _DICTS]
    numbered = [
        container.path or f"the state ({', '.join(map(key_text, container.keys[:3]))})"
        for container in all_dicts
        if any(type(key) is not str for key in container.keys)
    ]
    dicts = [container.path or "the state" for container in all_dicts if container.node[0] != "d"]
    flagged = [leaf.path for leaf in leaves(tree) if leaf.kind != "value" and leaf.flags]
    if numbered:
        yield f"DCP makes all keys strings: those of {listed(numbered)} were not"
    if dicts:
        yield f"DCP makes all mappings plain dicts: {listed(dicts)} was not"
    if flagged:
        yield f"DCP gives plain tensors: {listed(flagged)} was a Parameter, or required a gradient"


def _containers(tree: Tree) -> Iterator[Container]:
    """The containers whose items DCP saves one by one."""
    if isinstance(tree, Container) and tree.node[0] not in _BY_VALUE:
        yield tree
        for child in tree.children:
            yield from _containers(child)
