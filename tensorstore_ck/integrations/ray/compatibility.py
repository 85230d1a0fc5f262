"""The supported versions of Ray, and the private and alpha names that this package uses."""

from typing import Any, Final

import ray

from tensorstore_ck.errors import InvalidOptionError, MissingExtraError
from tensorstore_ck.integrations.trainer.versions import Package

PACKAGE: Final = Package(title="Ray", name="ray[train]", lowest=(2, 56), above=(3, 0), tested="ray[train]==2.60.0")
"""Earlier ones cannot list checkpoints without a wait (`timeout_s`)."""


def num_to_keep() -> int | None:
    """`CheckpointConfig.num_to_keep` of the run that this process is a worker of; None: Ray keeps everything.

    Raises:
        MissingExtraError: Ray's version is not supported, or a private name is not what it was.
        InvalidOptionError: this process is no worker of Ray Train.
    """
    PACKAGE.require_version(ray.__version__)
    try:
        from ray.train.v2._internal.execution.context import get_train_context  # noqa: PLC0415 - a private name
    except ImportError as exc:
        raise _changed("get_train_context") from exc
    try:
        context = get_train_context()
    except RuntimeError as exc:
        raise InvalidOptionError(
            "tsck.ray is for functions that Ray Train runs in its workers, such as the train_loop_per_worker of a TorchTrainer; elsewhere "
            "use tsck.Checkpointer",
            object_id="ray",
        ) from exc
    try:
        limit: int | None = context.train_run_context.run_config.checkpoint_config.num_to_keep
    except AttributeError as exc:
        raise _changed(exc.name) from exc
    return limit


def reported_checkpoints() -> list[Any]:
    """The checkpoints that Ray keeps, without waiting for the newest reports. Raises `MissingExtraError` if an alpha name has changed."""
    try:
        from ray.train import CheckpointConsistencyMode, get_all_reported_checkpoints  # noqa: PLC0415 - alpha names
    except ImportError as exc:
        raise _changed(exc.name) from exc
    reported: list[Any] = get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED, timeout_s=0)
    return reported


def _changed(name: str | None) -> MissingExtraError:
    return MissingExtraError(
        f"Ray {ray.__version__} has no {name}, or Ray Train version 1 is switched on: run `pip install '{PACKAGE.tested}'`, with which "
        "this was tested",
        object_id=f"ray.{name}",
    )
