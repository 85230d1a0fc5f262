"""Before anything imports torchtitan: it would take a machine without GPUs for one with CUDA."""

import importlib.util

if importlib.util.find_spec("torchtitan") is not None:
    from tests.integrations.titan import on_cpu  # noqa: F401
