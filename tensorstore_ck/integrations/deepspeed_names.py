"""The names in snapshots of DeepSpeed engines. Needs no DeepSpeed, so that imports and exports have the same names as engines."""

from typing import Final

NOTE: Final = "deepspeed"
"""The key of a snapshot's metadata under which its tag is."""
LATEST: Final = "latest"
MASTER: Final = "master"
"""The state of the optimizer that is a parameter's master weights."""
COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""Attributes of an engine, under ``extra.deepspeed``."""
MICRO_OFFSET: Final = "micro_offset"
"""One more of a pipeline."""
UNSAVED_COUNTERS: Final = ("micro_steps", MICRO_OFFSET)
"""The counters that DeepSpeed does not save."""
EXPORTED: Final = "tensorstore_ck"
"""They are in a dict of this name in the model states of an export."""
SCALE: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of its loss scaler that change, under ``scaler``; the others are its configuration."""
CLIENT_STATE: Final = "client_state"
"""Among each rank's own values."""
