"""Before anything imports Megatron: it would ask CUDA."""

import importlib.util

if importlib.util.find_spec("megatron") is not None:
    from tests.integrations.megatron import on_cpu  # noqa: F401
