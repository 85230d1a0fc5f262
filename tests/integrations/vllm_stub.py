"""What the plugin uses of vLLM 0.33, with the signatures and checks of its sources; `installed` puts it in the place of vLLM."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CALLS: list[str] = []


class GroupCoordinator(SimpleNamespace):
    rank: int
    ranks: list[int]
    world_size: int
    local_rank: int
    rank_in_group: int
    cpu_group: Any
    device_group: Any

    device = torch.device("cpu")

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.ranks[-1]


GROUPS = {name: GroupCoordinator(rank=0, ranks=[0], world_size=1) for name in ("world", "dp", "tp")}


def get_world_group() -> GroupCoordinator:
    return GROUPS["world"]


def get_dp_group() -> GroupCoordinator:
    return GROUPS["dp"]


def get_tp_group() -> GroupCoordinator:
    return GROUPS["tp"]


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...


LOADERS: dict[str, type[BaseModelLoader]] = {}


def register_model_loader(load_format: str) -> Callable[[type], type]:
    def wrap(cls: type) -> type:
        if not issubclass(cls, BaseModelLoader):
            raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
        LOADERS[load_format] = cls
        return cls

    return wrap


class WeightTransferInitInfo(ABC):  # noqa: B024 - as there
    pass


class WeightTransferUpdateInfo(ABC):  # noqa: B024 - as there
    pass


class WeightTransferEngine(ABC):
    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, vllm_config.model_config

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))


class WeightTransferEngineFactory:
    _registry: dict[str, Callable[[], type[WeightTransferEngine]]] = {}  # noqa: RUF012 - as there

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: type[WeightTransferEngine]) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: module_path_or_cls


class LoRAResolver(ABC):
    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any: ...


class LoRAResolverRegistry:
    resolvers: dict[str, LoRAResolver] = {}  # noqa: RUF012 - as there

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: LoRAResolver) -> None:
        cls.resolvers[resolver_name] = resolver


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")


def initialize_layerwise_reload(model: Any) -> None:
    CALLS.append("initialize")


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    CALLS.append("finalize")


MODULES = {
    "distributed.parallel_state": (GroupCoordinator, get_world_group, get_dp_group, get_tp_group),
    "distributed.weight_transfer.base": (WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo),
    "distributed.weight_transfer.factory": (WeightTransferEngineFactory,),
    "lora.request": (LoRARequest,),
    "lora.resolver": (LoRAResolver, LoRAResolverRegistry),
    "model_executor.model_loader": (register_model_loader,),
    "model_executor.model_loader.base_loader": (BaseModelLoader,),
    "model_executor.model_loader.reload": (initialize_layerwise_reload, finalize_layerwise_reload),
}
IMPORTERS = ("examples.vllm_plugin", "examples.vllm_follower")


@contextmanager
def installed() -> Iterator[None]:
    """The modules of vLLM are these."""
    made: dict[str, ModuleType] = {}
    for path, members in MODULES.items():
        names = ["vllm", *path.split(".")]
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            made.setdefault(name, ModuleType(name))
        for member in members:
            setattr(made[f"vllm.{path}"], member.__name__, member)
    before = {name: sys.modules.get(name) for name in (*made, *IMPORTERS)}
    sys.modules.update(made)
    for name in IMPORTERS:
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
