"""The small files of a model folder, for snapshots: configuration, generation configuration, tokenizer; of an adapter also peft's names.

They are what ``save_pretrained`` writes. `tsck export --to hf` writes them again, next to the weights of a snapshot.
"""

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.exporting.try_model_folder import quiet_transformers
from tensorstore_ck.integrations.model_file_names import ADAPTER_NAMES, MAX_FILE_BYTES, MODEL_FILES, is_model_file

_ADAPTER_WEIGHTS = "adapter_model.safetensors"


@short_errors
def model_files(model: Any, processing_class: Any = None) -> dict[str, bytes]:
    """The files that `save_pretrained` writes next to the weights: name -> content.

    Put them into a state for `tsck export --to hf`: ``TrainingState(model=model, extra={"model_files": model_files(model, tokenizer)})``,
    or ``put_snapshot({"model": model.state_dict(), "model_files": model_files(model, tokenizer)})``.

    Args:
        model: A model of transformers or peft, not wrapped. Any other has no files.
        processing_class: Its tokenizer or processor.
    """
    # what save_pretrained prints is about weights, which are not saved here
    with tempfile.TemporaryDirectory(prefix="model-files-") as name, quiet_transformers():
        folder = Path(name)
        names = _save_model(model, folder)
        if processing_class is not None:
            processing_class.save_pretrained(name)
        paths = sorted(path for path in folder.iterdir() if path.is_file() and is_model_file(path.name))
        files = {path.name: path.read_bytes() for path in paths if path.stat().st_size <= MAX_FILE_BYTES}
    return files if names is None else {**files, ADAPTER_NAMES: json.dumps(names, indent=1).encode()}


def _save_model(model: Any, folder: Path) -> Mapping[str, str] | None:
    """Writes the model's files without its weights. Returns, of an adapter: name in peft's file -> name in the model."""
    if hasattr(model, "peft_config"):  # of peft, or of transformers with an adapter
        # peft decides which weights are the adapter's, and under which names: it is given a number in place of each
        names = list(model.state_dict())
        numbers = {name: torch.tensor([number]) for number, name in enumerate(names)}
        adapter = model.active_adapter if isinstance(model.active_adapter, str) else None
        options = {} if adapter is None or isinstance(model, PreTrainedModel) else {"selected_adapters": [adapter]}
        model.save_pretrained(folder, state_dict=numbers, **options)
        (written,) = folder.rglob(_ADAPTER_WEIGHTS)
        for path in written.parent.iterdir():
            path.rename(folder / path.name)  # peft writes an adapter that has a name of its own into a folder below
        return {to: names[int(number)] for to, number in load_file(folder / _ADAPTER_WEIGHTS).items()}
    if isinstance(model, PreTrainedModel):
        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedValueError("the model was sharded by transformers when it was loaded", object_id="distributed_config")
        model.save_pretrained(folder, state_dict={})
    return None


def capture(trainer: Any, group: "dist.ProcessGroup | None") -> dict[str, Any]:
    """The files for the snapshots of a Trainer, for `TrainingState`'s ``extra``. Rank 0 makes them, and sends them to the others."""
    sent = [_of_trainer(trainer) if group is None or group.rank() == 0 else {}]
    if group is not None:
        dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
    return {MODEL_FILES: sent[0]} if sent[0] else {}


def _of_trainer(trainer: Any) -> dict[str, bytes]:
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    try:
        return model_files(model, processing)
    except Exception as exc:  # noqa: BLE001 - code of any model and tokenizer; a run must not end for it
        warnings.warn(
            f"snapshots will not contain the configuration and the tokenizer ({type(exc).__name__}: {exc}): `tsck export --to hf` will "
            "need --config-from",
            stacklevel=2,
        )
        return {}
