"""Snapshots in MLflow: `log_snapshot` notes in a run where a snapshot is, `find_snapshot` returns that.

The tags ``tsck.root``, ``tsck.ref``, ``tsck.step`` and ``tsck.store`` name the snapshot that was logged last; a small file for each one is
among the run's artifacts: ``snapshots/runs/gpt@1000.json``. Uses public functions of MLflow only, and its tracking URI.
"""

import json
import re
from typing import Any, Final

from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidNameError, InvalidOptionError, NotFoundError
from tensorstore_ck.integrations.tracked_snapshots import Pin, TrackedSnapshot, checked_pointer, find_published, pin_snapshot, reference_to
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer
from tensorstore_ck.integrations.trainer.versions import Package
from tensorstore_ck.log.field_checks import is_ref_name
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.redaction import display_url
from tensorstore_ck.store import ReadOnlyStore, Store

__all__ = ["find_snapshot", "log_snapshot"]

with extra("mlflow", "logging snapshots to MLflow"):
    import mlflow
    from mlflow.entities import RunTag
    from mlflow.exceptions import MlflowException

PACKAGE: Final = Package("mlflow", "mlflow-skinny", (3, 6), (4, 0))
FOLDER: Final = "snapshots"
"""The folder among the run's artifacts."""
_ROOT: Final = re.compile("[0-9a-f]{64}")


@short_errors
def log_snapshot(store: Store | ReadOnlyStore, snapshot: str | Snapshot, *, run_id: str | None = None, pin: Pin = True) -> Snapshot:
    """Notes in a run of MLflow where a snapshot is. With several ranks, one of them calls this.

    Args:
        store: The store. Its URL is logged, without credentials.
        snapshot: What `Store.put_snapshot` returned, or an address.
        run_id: The run; by default the active one.
        pin: True: policies and `Store.forget` keep the snapshot until ``store.unpin(root, owner="mlflow:RUN_ID")``. A duration, such as
            ``"30d"``: for that time. False: no pin.

    Returns:
        The snapshot.

    Raises:
        InvalidOptionError: no run is active, or the run was deleted.
        NotFoundError: there is no such snapshot, or no such run.
        PermissionDeniedError: the store was opened read-only: use ``pin=False``.
        MissingExtraError: this version of MLflow is not supported.
        mlflow.exceptions.MlflowException: the tracking server failed. The snapshot is pinned; call this again.
    """
    published = find_published(store, snapshot)
    run = _run(run_id)
    run_id = run.info.run_id
    pin_snapshot(store, published, pin, owner=f"mlflow:{run_id}", reason=f"logged to MLflow, run {run.info.run_name}")
    step = "" if published.step is None else str(published.step)
    file = {
        **TrackedSnapshot(store.url, published.root)._asdict(),
        "ref": published.ref,
        "step": published.step,
        "url": reference_to(store, published),
    }
    tags = {"tsck.store": store.url, "tsck.root": published.root, "tsck.ref": published.ref, "tsck.step": step}
    client = mlflow.MlflowClient()
    client.log_text(run_id, json.dumps(file, indent=2), _path(f"{published.ref}@{step}" if step else published.root))
    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()], synchronous=True)
    return published


@short_errors
def find_snapshot(run_id: str | None = None, address: str | None = None) -> TrackedSnapshot:
    """The snapshot that a run logged last; or at `address`.

    The result is as trustworthy as the tracking server: anyone who can write there can name another store.

    Args:
        run_id: The run; by default the active one.
        address: ``ref@step``, as logged; of a snapshot without a step its root.

    Returns:
        The URL of the store, for `tensorstore_ck.open`, and the root, for `Store.checkout`.

    Raises:
        InvalidOptionError: no run is active.
        InvalidNameError: `address` is malformed.
        NotFoundError: there is no such run, or it has not logged this snapshot.
        InputError: what it has logged names no snapshot.
        MissingExtraError: this version of MLflow is not supported.
    """
    run = _run(run_id, deleted=True)
    run_id, tags = run.info.run_id, run.data.tags
    where = f"the run {run_id!r} of MLflow"
    if address is None:
        if "tsck.root" not in tags:
            raise NotFoundError(f"{where} has logged no snapshot: use tsck.mlflow.log_snapshot", object_id=run_id)
        return checked_pointer(tags.get("tsck.store", ""), tags["tsck.root"], where)
    if not is_ref_name(address.partition("@")[0]) and not _ROOT.fullmatch(address):
        raise InvalidNameError(f"{address!r} is not an address: use ref@step as logged, or a root", object_id=address)
    path = _path(address)
    logged = [artifact.path for artifact in mlflow.MlflowClient().list_artifacts(run_id, path.rpartition("/")[0])]
    if path not in logged:
        near = ", ".join(name.removeprefix(f"{FOLDER}/").removesuffix(".json") for name in logged[:8]) or "no snapshots there"
        raise NotFoundError(f"{where} has not logged {address!r}, but {near}", object_id=address)
    pointer = SnapshotPointer.decode(mlflow.artifacts.load_text(f"runs:/{run_id}/{path}"), f"{path} of {where}")
    return checked_pointer(pointer.store, pointer.address, f"{path} of {where}")


def _run(run_id: str | None, *, deleted: bool = False) -> Any:
    PACKAGE.require_version(mlflow.__version__)
    if run_id is None:
        active = mlflow.active_run()
        if active is None:
            raise InvalidOptionError("no run of MLflow is active in this thread: use `with mlflow.start_run():`, or pass run_id=")
        run_id = active.info.run_id
    try:
        run = mlflow.MlflowClient().get_run(run_id)
    except MlflowException as exc:
        if exc.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise NotFoundError(f"there is no run {run_id!r} at {display_url(mlflow.get_tracking_uri())}", object_id=run_id) from exc
    if run.info.lifecycle_stage == "deleted" and not deleted:
        raise InvalidOptionError(f"the run {run_id!r} of MLflow was deleted: restore it, or log to another", object_id=run_id)
    return run


def _path(name: str) -> str:
    return f"{FOLDER}/{name}.json"
