"""A snapshot as a file of `torch.save`: types, values, shared memory and gradient flags as `Store.checkout` returns them."""

import os
import pickle
from typing import Final, NamedTuple

import torch

from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import leaves
from tensorstore_ck.integrations.exporting.atomic_target import require_disk_space
from tensorstore_ck.integrations.exporting.byte_routing import ByteRouter
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.meta_state import MetaState
from tensorstore_ck.integrations.exporting.output_file import OutputFile
from tensorstore_ck.integrations.exporting.torch_zip_template import TorchZipTemplate, build_template, require_savable
from tensorstore_ck.state import capture

SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
NAME: Final = "model.pt"


def write_torch(job: ExportJob) -> WrittenExport:
    """Writes the file into the job's folder. Raises `UnsupportedValueError` if torch cannot save the state."""
    content, tree, folder, target = job.content, job.tree, job.folder, job.target
    meta = MetaState(content, tree, by_value=frozenset("r"))  # a registered type may read its tensors
    meta.require_one_dtype()
    require_savable(((tensor, leaf.path) for tensor, leaf in meta.tensors.values()), target.path)
    template = build_template(meta.state, target.path)
    require_disk_space(folder, template.size_bytes, target.path)
    path = os.path.join(folder, os.path.basename(target.path) if target.is_file else NAME)
    with OutputFile(path, target.path, is_summed=True) as file:
        output, router = TorchOutput(file, template), ByteRouter(content)
        output.route(router, content, meta)
        router.run(os.path.join(folder, "scratch"))
        output.finish()
    notes = _reopened(path, meta.state, target.path)
    kept = [leaf for leaf in leaves(tree) if leaf.kind != "value"]
    return WrittenExport(len(kept), sum(len(gap.region) for gap in template.gaps), {}, notes)


class TorchOutput(NamedTuple):
    """One file of `torch.save` whose tensors a `ByteRouter` writes."""

    file: OutputFile
    """Which is summed."""
    template: TorchZipTemplate

    def route(self, router: ByteRouter, content: SnapshotContent, meta: MetaState) -> None:
        """Adds the stored tensors to the router, and writes the others."""
        file = self.file
        for gap in self.template.gaps:
            stored = meta.stored_in(gap.storage)
            if not stored:  # it has its bytes
                file.write(gap.offset, torch.tensor([], dtype=torch.uint8).set_(gap.storage).numpy().data)
                continue
            end = 0
            for number, offset in [*stored, (None, gap.storage.nbytes())]:
                file.write(gap.offset + end, bytes(offset - end))  # unused bytes between tensors of one storage
                if number is not None:
                    router.add(number, file, gap.offset + offset)
                    end = offset + content.layout.tensors[number].size_bytes

    def finish(self) -> None:
        """Reads the tensors back, adds their checksums, and makes the file durable: see `OutputFile`."""
        regions = [gap.region for gap in self.template.gaps]
        for offset, data in self.template.sealed(self.file.read_back(regions)):
            self.file.write(offset, data)
        self.file.finish(self.template.size_bytes, regions)


def _reopened(path: str, state: object, shown: str) -> list[str]:
    """Opens the file as its readers will, and compares all but tensor bytes with the state; returns notes for readers."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if unsafe:
            return [
                f"torch.load needs weights_only=False, or torch.serialization.add_safe_globals, for {listed(sorted(unsafe))}: "
                "the snapshot has types that torch does not load otherwise"
            ]
        reread = _form(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except (RuntimeError, pickle.UnpicklingError) as exc:
        raise CorruptObjectError(f"torch cannot read {shown} back ({exc}): the export was aborted", object_id=shown) from exc
    if reread != _form(state):
        raise CorruptObjectError(
            f"torch reads something else from {shown} than the snapshot holds: the export was aborted", object_id=shown
        )
    return []


def _form(state: object) -> tuple[bytes, bytes, list[bytes]]:
    """Everything in a state except tensor bytes: types, names, shapes, shared memory, values."""
    taken = capture(state)
    return taken.layout.encoded, pack_body(list(taken.values)), list(taken.blobs)
