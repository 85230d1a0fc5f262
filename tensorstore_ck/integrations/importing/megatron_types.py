"""The types that Megatron pickles, by the names under which `tensorstore_ck.megatron` stores them. Needs no Megatron."""

import signal
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from tensorstore_ck.integrations.importing.malformed import MalformedError
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, Deferred
from tensorstore_ck.state.registered_types import NamedState

_STATES: Final = """NOT_RUNNING_YET INITIAL_RUN RERUNNING_IN_PLACE WILL_RERUN_FROM_CHECKPOINT RERUNNING_FROM_CHECKPOINT
    RERUNNING_AGAIN_FROM_CHECKPOINT"""


def _counted(names: str, first: int = 1) -> dict[object, str]:
    return dict(enumerate(names.split(), first))


ENUMS: Final[Mapping[tuple[str, str], Mapping[object, str]]] = {
    ("megatron.core.transformer.enums", "AttnBackend"): _counted("flash fused unfused local auto"),
    ("megatron.core.transformer.enums", "CudaGraphScope"): _counted(
        "full_iteration attn mlp moe moe_router moe_preprocess mamba full_iteration_inference"
    ),
    ("megatron.core.transformer.enums", "CudaGraphModule"): _counted("attn mlp moe moe_router moe_preprocess mamba"),
    ("megatron.core.transformer.enums", "InferenceCudaGraphScope"): _counted("none layer block"),
    ("megatron.core.enums", "ModelType"): _counted("encoder_or_decoder"),
    ("megatron.core.rerun_state_machine", "RerunDiagnostic"): {
        name.lower(): name for name in ("CORRECT_RESULT", "TRANSIENT_ERROR", "PERSISTENT_ERROR")
    },
    ("megatron.core.rerun_state_machine", "RerunMode"): {
        name.lower(): name for name in ("DISABLED", "VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS")
    },
    ("megatron.core.rerun_state_machine", "RerunState"): _counted(_STATES, 0),
    ("signal", "Signals"): {int(member): member.name for member in signal.Signals},
}
"""Module and name -> value in a pickle -> the member's name, of Megatron-core 0.16 to 0.19."""
_NAMESPACES: Final = {
    ("argparse", "Namespace"): "argparse.Namespace",
    ("types", "SimpleNamespace"): "types.SimpleNamespace",
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"): "megatron.OptimizerConfig",
}


def megatron_types() -> dict[tuple[str, str], object]:
    """For `PickleAllowlist.allow`."""
    types: dict[tuple[str, str], object] = {}
    for (module, name), members in ENUMS.items():
        types[module, name] = AllowedGlobal(name, partial(_member, f"megatron.{name}", members))
    for (module, name), stored in _NAMESPACES.items():
        types[module, name] = AllowedGlobal(name, partial(_Attributes, stored))
    for module in ("pathlib", "pathlib._local"):
        types[module, "PosixPath"] = AllowedGlobal("PosixPath", _posix_path)
    types["_io", "BytesIO"] = AllowedGlobal("BytesIO", _BytesIO)
    return types


def _member(stored: str, members: Mapping[object, str], value: Any) -> NamedState:
    if type(value) not in (int, str) or value not in members:
        raise MalformedError(f"it has a {stored} of the value {value!r:.40}, which Megatron-core 0.19 does not have")
    return NamedState(stored, members[value])


def _posix_path(*parts: Any) -> NamedState:
    if any(type(part) is not str for part in parts):
        raise MalformedError("it has a path of something else")
    first = parts[0] if parts else ""
    return NamedState("pathlib.PosixPath", first + "/".join(parts[1:]) if first.endswith("/") else "/".join(parts) or ".")


class _Attributes(Deferred):
    """An object whose state is its attributes."""

    def __init__(self, stored: str) -> None:
        super().__init__()
        self.value: Any = NamedState(stored, {})

    def build(self, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise MalformedError("it sets malformed attributes")
        self.value.state = state
        self.held = list(state.values())


class _BytesIO(Deferred):
    """A stream of bytes. Its position is not kept."""

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 3 or type(state[0]) is not bytes or state[2] is not None:
            raise MalformedError("it has a malformed BytesIO")
        self.value = NamedState("io.BytesIO", state[0])
