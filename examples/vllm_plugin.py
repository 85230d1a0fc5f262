"""Three doors of vLLM (read against vLLM 0.33). A plugin registers them: in the pyproject.toml of a package of yours

    [project.entry-points."vllm.general_plugins"]
    tensorstore_ck = "examples.vllm_plugin:register"

A model from a snapshot:

    llm = LLM(MODEL, load_format="tsck", model_loader_extra_config={"store": "s3://bucket/ckpt", "address": "runs/rl", "prefix": "model."})

Weight transfer, with `weight_transfer_config=WeightTransferConfig(backend="tsck")`:

    llm.init_weight_transfer_engine({"init_info": {"store": "s3://bucket/ckpt", "ref": "runs/rl", "prefix": "model."}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"root": store.resolve("runs/rl").root}})
    llm.finish_weight_update()

Adapters of peft by address, where TSCK_STORE is set: "model": "tsck:runs/lora@400" in a request. vLLM keeps an adapter by its name.
"""

import asyncio
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import tensorstore_ck as tsck
from examples.held_weights import HeldWeights, common_root
from examples.vllm_follower import engine_workers
from tensorstore_ck.integrations.exporting import export_snapshot


class SnapshotLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model from a snapshot, a tensor at a time."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: a snapshot is read as it is loaded."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Reads and verifies the snapshot's tensors, and gives them to the model."""
        about = self.load_config.model_loader_extra_config
        prefix = about.get("prefix", "")
        with ExitStack() as stack:
            store = stack.enter_context(tsck.open(about["store"], read_only=True))
            snapshot = stack.enter_context(store.open_snapshot(common_root(store, about["address"], engine_workers())))
            model.load_weights((name.removeprefix(prefix), snapshot[name][...]) for name in snapshot if name.startswith(prefix))


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What is followed."""

    store: str
    ref: str
    prefix: str = ""
    host_cache: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version, the same for all workers."""

    root: str


class StoreEngine(WeightTransferEngine):  # type: ignore[misc]
    """Takes versions from a store, without a connection to the trainer."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False  # the branch has the weights of one model
    held: HeldWeights | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Reads the newest snapshot into host memory, each worker a part."""
        self.shutdown()
        about = init_info
        self.held = HeldWeights(about.store, about.ref, about.prefix, host_cache=about.host_cache, workers=engine_workers())

    def start_weight_update(self) -> None:
        """As vLLM's engines that receive whole checkpoints."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Reads what changed, and loads all weights."""
        if self.held is None:
            raise RuntimeError("call init_weight_transfer_engine first: it says which branch is followed")
        self.held.stage(update_info.root)
        self.held.loaded = None  # each update begins with empty layers
        self.held.load(self.model.load_weights)

    def finish_weight_update(self) -> None:
        """As vLLM's engines that receive whole checkpoints."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Closes the store; vLLM calls it also where nothing was followed."""
        if self.held is not None:
            self.held.store.close()


class AdapterResolver(LoRAResolver):  # type: ignore[misc]
    """Adapters of peft by address: each is written to a folder once, by its root."""

    def __init__(self, store: str, folder: Path) -> None:
        self.store, self.folder = store, folder

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """The adapter; None if the name is of another resolver, or there is no such snapshot."""
        scheme, _, address = lora_name.partition(":")
        return await asyncio.to_thread(self._export, lora_name, address) if scheme == "tsck" else None

    def _export(self, lora_name: str, address: str) -> Any:
        with tsck.open(self.store, read_only=True) as store:
            try:
                root = store.resolve(address).root
            except tsck.errors.InputError:
                return None
            path = self.folder / root[:32]
            if not path.exists():
                export_snapshot(store, root, path, format="hf")
        return LoRARequest(lora_name=lora_name, lora_int_id=int(root[:15], 16) + 1, lora_path=str(path))


def register() -> None:
    """Called by vLLM in each of its processes."""
    register_model_loader("tsck")(SnapshotLoader)
    if "tsck" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("tsck", StoreEngine)
    if "TSCK_STORE" in os.environ:
        folder = Path(os.environ.get("TSCK_LORA_FOLDER", "~/.cache/tsck-lora")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        LoRAResolverRegistry.register_resolver("tensorstore_ck", AdapterResolver(os.environ["TSCK_STORE"], folder))
