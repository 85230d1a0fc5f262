"""Ray Train over a store: ``tensorstore_ck.ray.report(metrics, state, store=store, ref="runs/x", step=step)``.

reporting.py         report: saves a snapshot, and reports a checkpoint that names it; restore; pins for what Ray keeps
compatibility.py     versions of Ray, and the private names that are used

Ray keeps, counts and deletes small folders; the snapshots are in the store.
"""

from tensorstore_ck.common.extras import extra

with extra("ray", "Ray Train over a store"):
    import ray.train  # noqa: F401

from tensorstore_ck.integrations.ray.reporting import report, restore

__all__ = ["report", "restore"]
