"""A snapshot as the file that `torch.save` makes of it: types, values, sharing and gradients' flags as `Store.checkout` gives them."""

import os
import pickle
from typing import Final

import torch

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import leaves
from tensorstore_ck.integrations.exporting.atomic_target import require_room
from tensorstore_ck.integrations.exporting.byte_routing import ByteRouter
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.meta_state import MetaState
from tensorstore_ck.integrations.exporting.output_file import OutputFile
from tensorstore_ck.integrations.exporting.torch_zip_template import require_savable, skeleton
from tensorstore_ck.state import capture
from tensorstore_ck.state.select import listed

SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
NAME: Final = "model.pt"


def write_torch(job: ExportJob) -> WrittenExport:
    """Writes the file into the job's folder.

    Raises:
        UnsupportedValueError: torch cannot save the state.
        DamageError: stored data is damaged, or the file does not hold what was written to it.
    """
    content, tree, folder, target = job.content, job.tree, job.folder, job.target
    hollow = MetaState(content, tree, by_value=frozenset("r"))  # what registered types make of tensors without bytes, nobody knows
    hollow.require_one_dtype()
    require_savable(((tensor, leaf.path) for tensor, leaf in hollow.tensors.values()), target.path)
    frame = skeleton(hollow.state, target.path)
    require_room(folder, frame.size_bytes, target.path)
    path = os.path.join(folder, os.path.basename(target.path) if target.is_file else NAME)
    with OutputFile(path, target.path) as file:
        placing = ByteRouter(content)
        for room in frame.rooms:
            stored = hollow.stored_in(room.storage)
            if not stored:  # it has its bytes
                file.write(room.offset, torch.tensor([], dtype=torch.uint8).set_(room.storage).numpy().data)
                continue
            end = 0
            for number, offset in [*stored, (None, room.storage.nbytes())]:
                file.write(room.offset + end, bytes(offset - end))  # unused bytes between tensors of one storage
                if number is not None:
                    placing.add(number, file, room.offset + offset)
                    end = offset + content.layout.tensors[number].size_bytes
        placing.pour(os.path.join(folder, "scratch"))
        regions = [room.region for room in frame.rooms]
        for offset, data in frame.sealed(file.read_back(regions)):
            file.write(offset, data)
        file.finish(frame.size_bytes, regions)
    notes = _reopened(path, hollow.state, target.path)
    kept = [leaf for leaf in leaves(tree) if leaf.kind != "value"]
    return WrittenExport(len(kept), sum(region.stop - region.start for region in regions), {}, notes)


def _reopened(path: str, state: object, shown: str) -> list[str]:
    """Opens the file as its readers will, and compares the form of what it holds with the state; returns what to tell them."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if unsafe:
            return [
                f"torch.load needs weights_only=False, or torch.serialization.add_safe_globals, for {listed(sorted(unsafe))}: "
                "the snapshot holds what torch does not load otherwise"
            ]
        found = _form(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except (RuntimeError, pickle.UnpicklingError) as exc:
        raise CorruptObjectError(f"torch cannot read {shown} back ({exc}): the export was given up", object_id=shown) from exc
    if found != _form(state):
        raise CorruptObjectError(
            f"torch reads something else from {shown} than the snapshot holds: the export was given up", object_id=shown
        )
    return []


def _form(state: object) -> tuple[bytes, bytes, list[bytes]]:
    """All of a state but its tensors' bytes: types, names, shapes, sharing, values."""
    taken = capture(state)
    return taken.layout.encode(), pack_body(list(taken.values)), list(taken.blobs)
