"""NeMo Automodel over a store: its own checkpointer, whose model and optimizer go to a store, each to a branch of its own.

A script of Automodel says so before the recipe makes its checkpointer::

    recipe = TrainFinetuneRecipeForNextTokenPrediction(config)  # checkpoint.model_save_format: torch_save
    recipe.cfg.checkpoint.build = functools.partial(StoreCheckpointer, recipe.cfg.checkpoint)
    recipe.setup()

The small files that Automodel writes itself stay in its folders.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer

from tensorstore_ck.integrations.dcp import Reader, Writer

STORE, REF = "s3://bucket/ckpt", "runs/nemo"


class StoreCheckpointer(Checkpointer):  # type: ignore[misc]
    """A recipe makes one."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        if self.config.is_peft or self.config.is_async:
            raise ValueError("this checkpointer saves whole models, and waits for it: set is_async: false, and no peft")
        self.writers = {part: Writer(STORE, f"{REF}/{part}") for part in ("model", "optim")}

    def _do_save(self, state_dict: dict[str, Any], path: str, storage_writer: Any = None) -> None:
        folder = Path(path)  # epoch_0_step_99/model
        writer = self.writers[folder.name]
        dcp.save(state_dict, checkpoint_id=folder.parent.name, storage_writer=writer, process_group=self.process_group)

    def _get_storage_reader(self, model_path: str, *arguments: Any, is_init_step: bool = False, **options: Any) -> Any:
        if is_init_step:  # the weights that a training begins with are read by Automodel
            return super()._get_storage_reader(model_path, *arguments, is_init_step=is_init_step, **options)
        folder = Path(model_path)
        return Reader(STORE, f"{REF}/{folder.name}@{folder.parent.name.rpartition('_')[2]}")

    def _do_load(self, state_dict: dict[str, Any], path: str, storage_reader: Any = None, is_init_step: bool = False) -> dict[str, Any]:
        if is_init_step:
            return super()._do_load(state_dict, path, storage_reader, is_init_step)  # type: ignore[no-any-return]
        reader = storage_reader or self._get_storage_reader(path, None)
        dcp.load(state_dict, storage_reader=reader, process_group=self.process_group)
        return state_dict
