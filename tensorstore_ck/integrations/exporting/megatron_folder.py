"""A snapshot as a folder of Megatron-core in its format torch_dist, for `dist_checkpointing.load` on any number of ranks.

Takes the flat dict of `megatron_layout`. Each tensor is one piece. Types of Megatron in the common state need Megatron here, as there.
"""

import io
import json
import os
import warnings
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.tree import Container, Leaf, Tree
from tensorstore_ck.integrations.exporting.byte_routing import size_bytes
from tensorstore_ck.integrations.exporting.dcp_folder import write_checkpoint
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.meta_state import MetaState
from tensorstore_ck.integrations.exporting.output_file import write_file
from tensorstore_ck.integrations.megatron_layout import COMMON, is_object_key
from tensorstore_ck.state.allocate import TensorAllocator
from tensorstore_ck.state.rebuild_tree import build, require_buildable

_CONFIG: Final = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def write_megatron(job: ExportJob) -> WrittenExport:
    """Writes the folder's files.

    Raises:
        UnsupportedValueError: the state is not one of Megatron.
        MissingExtraError: it has values of Megatron's types, and Megatron is not installed.
    """
    entries = _entries(job)
    tensors = {key: child for key, child in entries.items() if isinstance(child, Leaf) and child.kind != "value"}
    values = {key: child for key, child in entries.items() if key not in tensors}
    wrong = [key for key in values if key != COMMON and not is_object_key(key)]
    if wrong:
        raise UnsupportedValueError(
            f"{listed(wrong)} is neither a tensor nor an object of Megatron: --to megatron takes snapshots of tensorstore_ck.megatron, "
            "imported folders of Megatron, and, with --names (names=), models of Hugging Face; leave out the rest with --exclude",
            object_id=wrong[0],
        )
    if any(map(_has_types, values.values())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of packages that are not installed
            from tensorstore_ck.integrations.megatron.safe_types import register_safe_types  # noqa: PLC0415 - an extra

            register_safe_types()
    built = {key: _value(job, child) for key, child in values.items()}
    meta = MetaState(
        job.content,
        Container(node=["d", [], []], path="", keys=list(tensors), children=list(tensors.values()), attributes=None),
        frozenset(),
    )
    state = {**meta.state, **{key: [value] for key, value in built.items() if key != COMMON}}
    forms = write_checkpoint(job, meta, state, DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    common = io.BytesIO()
    torch.save(built.get(COMMON, {}), common)
    for name, data in (("common.pt", common.getvalue()), ("metadata.json", json.dumps(_CONFIG).encode())):
        write_file(os.path.join(job.folder, name), job.target.path, data)
    notes = [] if COMMON in built else ["there is no common state, such as Megatron-LM's arguments and iteration: common.pt is empty"]
    return WrittenExport(len(forms), sum(map(size_bytes, forms)), {}, notes)


def _entries(job: ExportJob) -> dict[str, Tree]:
    tree = job.tree
    if not isinstance(tree, Container) or tree.node[0] != "d" or any(type(key) is not str for key in tree.keys):
        raise UnsupportedValueError(
            "--to megatron takes a flat dict of tensors by name, and this state is not one: export as torch or dcp",
            object_id=job.target.path,
        )
    return dict(zip(tree.keys, tree.children, strict=True))


def _has_types(tree: Tree) -> bool:
    if not isinstance(tree, Container):
        return False
    attributes = () if tree.attributes is None else (tree.attributes,)
    return tree.node[0] == "r" or any(map(_has_types, (*tree.children, *attributes)))


def _value(job: ExportJob, tree: Tree) -> Any:
    wanted = require_buildable(tree, job.content).items()
    fresh = TensorAllocator(job.content.layout, wanted, torch.device("cpu"))
    job.content.read(fresh.targets)
    return build(tree, job.content, fresh.get)
