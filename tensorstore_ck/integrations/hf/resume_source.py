"""The meaning of ``train(resume_from_checkpoint=...)``: a snapshot of the store, a folder that transformers wrote, or the beginning.

A snapshot that `tsck import` made of a checkpoint folder of transformers is written as such a folder again, which exists while the run that
resumes from it trains.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from tensorstore_ck.errors import MismatchError, NotFoundError, UnsupportedValueError
from tensorstore_ck.integrations.exporting.export_snapshot import export_snapshot
from tensorstore_ck.integrations.model_file_names import MODEL_FILES, is_model_file
from tensorstore_ck.integrations.trainer.pointers import read_pointer
from tensorstore_ck.integrations.trainer.saves import require_own_ref
from tensorstore_ck.integrations.trainer_names import TRAINER_STATE
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.store import Store
from tensorstore_ck.training.resume_search import ResumeSearch

AUTO: Final = "auto"
"""The newest snapshot if there is one."""
ARGUMENT: Final = f'resume_from_checkpoint="{AUTO}"'


class NoCheckpointError(NotFoundError, ValueError):
    """There is neither a snapshot nor a folder to resume from; transformers raises the built-in error."""

    __str__ = Exception.__str__


def begin_search(store: Store, given: str | bool | None, ref: str, group: "dist.ProcessGroup | None") -> ResumeSearch | None:
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


_FOLDER: Final = "imported-checkpoint"
_TORCH_FILES: Final = {"optimizer": ".pt", "scheduler": ".pt", "scaler": ".pt", "rng_state": ".pth"}
"""The start of a part's name -> the suffix of its file."""


def write_imported(store: Store, address: str, output_dir: str, group: "dist.ProcessGroup | None", *, writes: bool) -> Path | None:
    """Writes the folder, in `output_dir`, if the snapshot is imported. All ranks call it; `writes`: this one is the first of its host.

    Raises:
        MismatchError: the snapshot has no weights that transformers reads from such a folder.
        DamageError: stored data is damaged.
    """
    folder = Path(output_dir) / _FOLDER
    read = partial(_write, store, folder, writes=writes)
    return folder if store.restoring(address, read, group=group)[0] else None


def remove_imported(output_dir: str) -> None:
    """Deletes the folder."""
    shutil.rmtree(Path(output_dir) / _FOLDER, ignore_errors=True)


def _write(store: Store, folder: Path, restoring: Restoring, *, writes: bool) -> bool:
    stored = restoring.lazy()
    values = stored.state_values
    if f"{TRAINER_STATE}.global_step" not in values:
        return False
    if not writes:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    root = restoring.info.root.hex()
    parts = dict.fromkeys(name.partition(".")[0] for name in [*stored.names(), *values])
    weights = [part for part in ("model", "adapter_model") if part in parts]
    if not weights:
        raise MismatchError(
            f"{root[:12]} was imported from a folder without a model.safetensors, as FSDP and DeepSpeed write it ({', '.join(parts)}): "
            "resume from the folder, with transformers' own Trainer",
            object_id=root,
        )
    for stem in weights:
        for file in _export(store, root=root, part=stem, path=folder / stem, format="safetensors"):
            file.rename(folder / file.name.replace("model", stem, 1))
        (folder / stem).rmdir()
    for part in parts:
        for start, suffix in _TORCH_FILES.items():
            if part == start or part.startswith(f"{start}_"):
                _export(store, root=root, part=part, path=folder / f"{part}{suffix}", format="torch")
    others: dict[str, Any] = restoring.selected(f"{TRAINER_STATE}.*", *([f"{MODEL_FILES}.*"] if MODEL_FILES in parts else []))
    (folder / TRAINER_STATE_NAME).write_text(json.dumps(others[TRAINER_STATE], indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name, data in others.get(MODEL_FILES, {}).items():
        if not is_model_file(name):
            raise UnsupportedValueError(f"{root[:12]} has {name!r} among the files of the model, which is none", object_id=name)
        (folder / name).write_bytes(data)
    return True


def _export(store: Store, root: str, part: str, path: Path, format: str) -> list[Path]:  # noqa: A002
    export_snapshot(store, root, path, format=format, select=[f"{part}.*"], strip_prefix=f"{part}.", max_file_bytes=1 << 62)  # type: ignore[arg-type]
    return sorted(path.iterdir()) if path.is_dir() else [path]
