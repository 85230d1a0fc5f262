"""The values that a resume needs, and that transformers keeps in memory only, or in a checkpoint folder's small files.

transformers does not save the losses since the last log: the first loss that it logs after a resume is of fewer steps.
"""

import dataclasses
import json
from typing import Any

import torch.distributed as dist
from transformers import Trainer as NativeTrainer
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.integrations.trainer_names import TRAINER_LOGGED, TRAINER_LOSS, TRAINER_STATE
from tensorstore_ck.store import Store
from tensorstore_ck.training.rank_group import ask_first_rank


def capture(trainer: NativeTrainer) -> dict[str, Any]:
    """The values of this rank, which differ by rank: only some ranks are the first of their host, and each measures its own time."""
    native: Any = trainer
    return {
        TRAINER_STATE: json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n",  # as TrainerState.save_to_json
        TRAINER_LOSS: native._tr_loss,
        TRAINER_LOGGED: native._globalstep_last_logged,
    }


def restore(trainer: NativeTrainer, values: dict[str, Any]) -> None:
    """Restores the losses since the last log. transformers has restored the `TrainerState` from the light folder."""
    native: Any = trainer
    loss = values[TRAINER_LOSS].to(native._tr_loss.device)
    native._tr_loss.copy_(loss)
    native._globalstep_last_logged = values[TRAINER_LOGGED]
    # `train_loss` is the mean over the steps of this call of train(): it must not count losses of steps before the resume
    native._total_loss_scalar = -loss.item()


def target() -> dict[str, Any]:
    """A dict with the keys that `capture` returned, to restore them into."""
    return dict.fromkeys((TRAINER_STATE, TRAINER_LOSS, TRAINER_LOGGED))


def note_callbacks(trainer: NativeTrainer) -> None:
    """Notes the states of callbacks in the `TrainerState`, as transformers does when it saves."""
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name, state = type(callback).__name__, callback.state()
            noted = trainer.state.stateful_callbacks[name]
            if isinstance(noted, list):
                noted.append(state)
            else:
                trainer.state.stateful_callbacks[name] = state


def step_metrics(state: TrainerState, store: Store, group: "dist.ProcessGroup | None") -> dict[str, float]:
    """The numbers that the first rank logged at the present step, on all ranks: each rank measures the time of an evaluation."""
    logged: dict[str, float] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            logged |= {name: float(value) for name, value in entry.items() if name not in ("step", "epoch") and type(value) in (int, float)}
    first = ask_first_rank(store, group, f"the metrics of step {state.global_step}", lambda: json.dumps(logged).encode())
    agreed: dict[str, float] = parse_json(first)
    return agreed
