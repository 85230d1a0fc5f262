"""Snapshots in Weights & Biases: `log_snapshot` logs an artifact that refers to a snapshot, `find_snapshot` returns what it refers to.

The artifact has one reference, ``tsck://ROOT::STORE``, which W&B never reads, and no files. Works offline. Uses public names of wandb only.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidNameError, InvalidOptionError, NotFoundError
from tensorstore_ck.integrations.tracked_snapshots import Pin, TrackedSnapshot, decode_reference, find_published, pin_snapshot, reference_to
from tensorstore_ck.integrations.trainer.versions import Package
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import ReadOnlyStore, Store

__all__ = ["find_snapshot", "log_snapshot"]

with extra("wandb", "logging snapshots to Weights & Biases"):
    import wandb

PACKAGE: Final = Package("wandb", "wandb", (0, 23), (1, 0))
REFERENCE: Final = "snapshot"
"""The name of the reference in the artifact."""


@short_errors
def log_snapshot(
    store: Store | ReadOnlyStore,
    snapshot: str | Snapshot,
    *,
    run: Any = None,
    name: str | None = None,
    artifact_type: str = "model",
    aliases: Iterable[str] = (),
    pin: Pin = True,
) -> Any:
    """Logs an artifact that refers to a snapshot. With several ranks, one of them calls this.

    Args:
        store: The store. Its URL is logged, without credentials.
        snapshot: What `Store.put_snapshot` returned, or an address.
        run: The `wandb.Run`; by default the active one.
        name: The artifact; by default the ref, with - in place of /.
        artifact_type: Its type.
        aliases: More aliases of this version, in addition to ``latest`` and ``step-N``.
        pin: True: policies and `Store.forget` keep the snapshot until ``store.unpin(root, owner="wandb:RUN_PATH")``. A duration, such as
            ``"30d"``: for that time. False, and in a disabled run: no pin.

    Returns:
        The `wandb.Artifact`, whose metadata has store, root, ref, step and metrics.

    Raises:
        InvalidOptionError: no run is active, or it is finished.
        InvalidNameError: W&B does not accept the artifact's name or type.
        NotFoundError: there is no such snapshot.
        PermissionDeniedError: the store was opened read-only: use ``pin=False``.
        MissingExtraError: this version of wandb is not supported.
    """
    PACKAGE.require_version(wandb.__version__)
    run = run or wandb.run
    if run is None:
        raise InvalidOptionError("no run of W&B is active: call wandb.init() first, or pass run=", object_id="run")
    published = find_published(store, snapshot)
    metrics = {key: value for key, value in published.metrics.items() if math.isfinite(value)}
    about = {"store": store.url, "root": published.root, "ref": published.ref, "step": published.step, "metrics": metrics}
    try:
        artifact = wandb.Artifact(name or published.ref.replace("/", "-"), type=artifact_type, metadata=about)
    except ValueError as exc:
        raise InvalidNameError(f"W&B does not accept the artifact: {exc}", object_id=str(name)) from exc
    artifact.add_reference(reference_to(store, published), name=REFERENCE, checksum=False)
    if not run.disabled:
        pin_snapshot(store, published, pin, owner=f"wandb:{run.path}", reason=f"logged to W&B, artifact {artifact.name}")
    steps = () if published.step is None else (f"step-{published.step}",)
    try:
        return run.log_artifact(artifact, aliases=["latest", *steps, *aliases])
    except wandb.errors.UsageError as exc:
        raise InvalidOptionError(f"{exc} Pass an active run=", object_id="run") from exc


@short_errors
def find_snapshot(artifact: Any) -> TrackedSnapshot:
    """The snapshot that an artifact refers to, such as one from ``run.use_artifact("runs-gpt:latest")``.

    The result is as trustworthy as the project in W&B: anyone who can write there can name another store.

    Args:
        artifact: A `wandb.Artifact`.

    Returns:
        The URL of the store, for `tensorstore_ck.open`, and the root, for `Store.checkout`.

    Raises:
        NotFoundError: it is not an artifact of `log_snapshot`.
        InputError: it names no snapshot.
        MissingExtraError: this version of wandb is not supported.
    """
    PACKAGE.require_version(wandb.__version__)
    where = f"the artifact {artifact.name!r}"
    entry = artifact.manifest.entries.get(REFERENCE)
    if entry is None or not entry.ref:
        raise NotFoundError(f"{where} refers to no snapshot: use one of tsck.wandb.log_snapshot", object_id=artifact.name)
    return decode_reference(entry.ref, where)
