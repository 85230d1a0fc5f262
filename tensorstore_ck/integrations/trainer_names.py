"""The names in each rank's snapshots of transformers' Trainer and of accelerate. Needs neither, so that imports have the same names."""

from typing import Final

TRAINER_STATE: Final = "trainer_state"
"""The Trainer's ``trainer_state.json``, as text."""
TRAINER_LOSS: Final = "loss_since_log"
TRAINER_LOGGED: Final = "logged_step"
ACCELERATOR_STEP: Final = "accelerator_step"
SAVE_ITERATION: Final = "save_iteration"
LOADERS: Final = "loaders"
CUSTOM: Final = "custom_"
"""The beginning of the name of a registered object; its number follows."""
