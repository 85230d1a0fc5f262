"""The meaning of ``train(resume_from_checkpoint=...)``: a snapshot of the store, a folder that transformers wrote, or the beginning."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.integrations.trainer.pointers import read_pointer
from tensorstore_ck.integrations.trainer.saves import require_own_ref
from tensorstore_ck.store import Store
from tensorstore_ck.training.resume_search import ResumeSearch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AUTO: Final = "auto"
"""The newest snapshot if there is one."""
ARGUMENT: Final = f'resume_from_checkpoint="{AUTO}"'


class NoCheckpointError(NotFoundError, ValueError):
    """There is neither a snapshot nor a folder to resume from; transformers raises the built-in error."""

    __str__ = Exception.__str__


def begin_search(store: Store, given: str | bool | None, ref: str, group: "ProcessGroup | None") -> ResumeSearch | None:
    """For the snapshot to resume from; None: transformers starts from the beginning, or resumes from a folder of its own."""
    if given is None or given is False:
        require_own_ref(store, ref, ARGUMENT)
        return None
    is_newest = given is True or given == AUTO
    address, missing = (ref, "") if is_newest else (str(given), f"Can't find a valid checkpoint at {given}: there is no such folder")
    if not is_newest and os.path.isdir(address):
        pointer = read_pointer(address)
        if pointer is None:
            return None
        address = pointer.address_in(store, address)
    missing = missing and f"{missing}, and no such snapshot in {store.url}"
    advice = "pass an earlier step, or resume_from_checkpoint={} to accept it"
    return ResumeSearch(store, address, group, advice=advice, missing=missing)


def native_folder(given: str | bool | None, output_dir: str, ref: str) -> str | bool | None:
    """The folder from which transformers resumes by itself; None: it starts from the beginning.

    For the newest it is the newest whole folder that transformers wrote, not a light one, whose save may never have been published.
    """
    if given is not True and given != AUTO:
        return given
    for folder in reversed(sort_checkpoints(output_dir)):
        if read_pointer(folder) is None and (Path(folder) / TRAINER_STATE_NAME).exists():  # their last file
            return str(folder)
    if given == AUTO:
        return None
    raise NoCheckpointError(
        f"No valid checkpoint found in output directory ({output_dir}), and {ref!r} has no snapshot: "
        f"at a first start, too, pass {ARGUMENT}",
        object_id=ref,
    )
