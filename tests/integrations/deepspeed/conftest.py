"""Before anything imports DeepSpeed: it would look for GPUs."""

import importlib.util

if importlib.util.find_spec("deepspeed") is not None:
    from tests.integrations.deepspeed import on_cpu  # noqa: F401
