"""What `--dask ADDRESS` opens."""

from contextlib import ExitStack, closing

from tensorstore_ck.cli.options import StoreChoice
from tensorstore_ck.common.executor import DaskCluster
from tensorstore_ck.engine.engine import Engine


def for_workers(stack: ExitStack, address: str | None, choice: StoreChoice, engine: Engine) -> tuple[Engine, DaskCluster | None]:
    """The engine with a backend for workers on other hosts, and their cluster; without an address the engine as it is.

    `stack` closes both.
    """
    if address is None:
        return engine, None
    engine = choice.portable(engine)
    stack.enter_context(closing(engine.backend))
    return engine, stack.enter_context(DaskCluster(address))
