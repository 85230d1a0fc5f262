"""A small llama in torchtitan's own Trainer on CPUs, whose inputs are noisy, so that a lost generator shows."""

import json
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchtitan's imports
    from tests.integrations.titan import on_cpu  # noqa: F401

    # isort: split
    import torchtitan.models.llama3 as llama
    from torchtitan.components import metrics
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

import tensorstore_ck as tsck

REF = "runs/t"
STEPS = 10
WARNINGS = [f"ignore:{message}" for message in ("'set_vital' is deprecated", "DTensor random operators", "To get the last learning rate")]
"""What torchtitan and its libraries warn of on CPUs."""
WORDS = 64
WIDTH = 32


class Run(NamedTuple):
    """What a run did."""

    batches: list[list[int]]
    """The first tokens of each batch, after the noise."""
    losses: list[tuple[int, float, int]]
    """Step, logged loss, tokens seen."""
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    drawn: float
    """What the process's generator draws next."""


def write_assets(folder: Path) -> None:
    """A tokenizer of words, and texts."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    words = ["<|begin_of_text|>", "<|end_of_text|>", "[UNK]", *(f"w{number}" for number in range(WORDS - 3))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | nothing))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": words[0], "eos_token": words[1]}))
    drawn = random.Random(1)
    texts = [" ".join(drawn.choices(words[3:], k=drawn.randrange(5, 40))) for _ in range(100)]
    (folder / "data" / "texts.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def model_spec(width: int = WIDTH, layers: int = 2, words: int = WORDS) -> ModelSpec:
    """As torchtitan's `model_registry`, but small, and with an attention that runs on CPUs. Its projections are fused."""
    rope = llama.ComplexRoPE.Config(dim=width // 4, max_seq_len=64, theta=500000, scaling="llama")
    blocks = llama._build_llama3_layers(
        fuse_qkv=True, n_layers=layers, dim=width, n_heads=4, n_kv_heads=2, hidden_dim=2 * width, rope=rope, attn_backend="flex"
    )
    for layer in blocks:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = llama.Llama3Model.Config(
        dim=width,
        vocab_size=words,
        tok_embeddings=llama.Embedding.Config(num_embeddings=words, embedding_dim=width, param_init=llama._EMBEDDING_INIT),
        norm=llama.RMSNorm.Config(normalized_shape=width, param_init=llama._NORM_INIT),
        lm_head=llama.Linear.Config(in_features=width, out_features=words, param_init=llama._output_linear_init(width)),
        layers=blocks,
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model,
        parallelize_fn=llama.parallelize_llama,
        pipelining_fn=llama.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=llama.Llama3StateDictAdapter,
    )


def make_config(folder: Path, checkpoint: Any, *, steps: int = STEPS, **parallelism: Any) -> Any:
    """`checkpoint`: the only difference between a run with a store and one without."""
    if not (folder / "assets" / "tokenizer.json").exists():
        write_assets(folder / "assets")
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(),
        hf_assets_path=str(folder / "assets"),
        dump_folder=str(folder / "out"),
        model_spec=model_spec(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=STEPS),
        training=TrainingConfig(local_batch_size=2, seq_len=16, steps=steps, disable_cuda_graphs=True),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(folder / "assets" / "data")),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(**parallelism),
        checkpoint=checkpoint,
    )


def snapshots(folder: Path, **options: Any) -> Any:
    """The manager's Config for a store in `folder`."""
    return tsck.titan.SnapshotManager.Config(**{"store": str(folder / "store"), "ref": REF, "interval": 3, "keep_latest_k": 0, **options})


def native(**options: Any) -> Any:
    """torchtitan's own manager."""
    return CheckpointManager.Config(**{"enable": True, "interval": 3, **options})


class Noisy(Trainer):  # type: ignore[misc]
    """Draws from the process's generator in each step, and notes what it does."""

    on_step: Callable[[int], object] = staticmethod(lambda step: None)
    noise = 0.2
    """Which share of the words it replaces. 0: it draws nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for module in (each for part in self.model_parts for each in part.modules() if isinstance(each, FSDPModule)):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
        self.batches: list[list[int]] = []
        self.losses: list[tuple[int, float, int]] = []
        self.metrics_processor.log = self._note

    def _note(self, step: int, loss: float, *_: float, extra_metrics: dict[str, Any]) -> None:
        self.losses.append((step, float(loss), int(extra_metrics["n_tokens_seen"])))

    def post_dataloading_process(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
        noisy = input_dict["input"]
        if self.noise:
            noisy = torch.where(torch.rand(labels.shape) < self.noise, 2, noisy)
        self.batches.append(noisy[:, :6].flatten().tolist())
        return super().post_dataloading_process({**input_dict, "input": noisy}, labels)

    def should_continue_training(self) -> bool:
        """torchtitan asks at the beginning of each step, which is after the save of the step before."""
        self.on_step(self.step)
        return bool(super().should_continue_training())


class _NoMemory:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None: ...


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """On every rank all of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(config: Any, on_step: Callable[[int], object] = lambda step: None, before: Callable[[Any], object] = lambda trainer: None) -> Run:
    """Trains to the end, as torchtitan's ``train.py``. `before` is called with the Trainer before the training."""
    os.environ.update({name: os.environ.get(name, value) for name, value in SINGLE.items()})
    quick = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    with (
        mock.patch("torchtitan.components.metrics.build_device_memory_monitor", _NoMemory),
        mock.patch("torchtitan.distributed.utils.set_pg_timeouts"),  # its barrier names a device of CUDA
        mock.patch("torchtitan.trainer.time", quick),
    ):
        torch.manual_seed(1)
        trainer = Noisy(config)
        trainer.on_step = on_step
        try:
            before(trainer)
            trainer.train()
            weights = {name: whole(each) for part in trainer.model_parts for name, each in part.state_dict().items()}
            moments = {name: whole(each) for name, each in trainer.optimizers.state_dict().items() if isinstance(each, torch.Tensor)}
            return Run(trainer.batches, trainer.losses, weights, moments, torch.rand(()).item())
        finally:
            trainer.close()
            if int(os.environ["WORLD_SIZE"]) == 1:
                dist.destroy_process_group()


SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def assert_continues(resumed: Run, undisturbed: Run, done: int) -> None:
    """It did what the undisturbed run did after `done` steps, bit for bit."""
    assert resumed.batches == undisturbed.batches[done:]
    assert resumed.losses == undisturbed.losses[done:]
    for mine, theirs in ((resumed.weights, undisturbed.weights), (resumed.moments, undisturbed.moments)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert resumed.drawn == undisturbed.drawn
