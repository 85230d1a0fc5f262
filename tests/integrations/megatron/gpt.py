"""A small GPT of Megatron with its DistributedOptimizer, on ranks over gloo, and what Megatron-LM saves of such a job."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, LENGTH = 32, 8


def join(tensor: int, pipeline: int, expert: int = 1) -> int:
    """Joins the ranks of torchrun; returns this one's rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # the one for training asks CUDA
    return dist.get_rank()


class Job:
    """A model, its optimizer, and the number of the next step."""

    def __init__(self, tensor: int, pipeline: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> None:
        """`layout`: how Megatron lays out the optimizer's state in a checkpoint."""
        is_half = dtype == torch.bfloat16
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=is_half,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
        )
        rank = dist.get_rank()
        torch.manual_seed(1)  # all ranks initialise the whole weights, and keep their part
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        ).to(dtype)
        self.model = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
        )
        options = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, bf16=is_half, params_dtype=dtype)
        self.optimizer = get_megatron_optimizer(options, [self.model])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.step, self.metadata = 0, {"distrib_optim_sharding_type": layout, "distrib_optim_fully_reshardable_mem_efficient": False}
        torch.manual_seed(100 + rank)
        np.random.seed(200 + rank)
        random.seed(300 + rank)

    def train(self) -> float:
        """One step; returns a number that depends on all that the job has: the norm of the gradients, and random numbers."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(self.step * 100 + parallel_state.get_data_parallel_rank())
        batches = [torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator) for _ in range(2)]
        get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        self.step += 1
        return float(norm) + torch.rand(()).item() + float(np.random.rand()) + random.random()

    def sharded_state_dict(self, *, is_loading: bool = False) -> dict[str, Any]:
        """As Megatron-LM makes it: model, optimizer, random numbers of each rank, and common values."""
        model = self.model.module.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=self.metadata)
        generators = [{"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rerun = {"mode": RerunMode.DISABLED, "rank": rank}
        return {
            "model": model,
            "optimizer": optimizer,
            "rng_state": ShardedObject("rng_state", generators, (ranks,), (rank,)),
            "rerun_state_machine_state": ShardedObject("rerun_state_machine_state", rerun, (ranks,), (rank,)),
            "iteration": self.step,
            "checkpoint_version": 3.0,
        }

    def save(self, folder: Path, strategy: Any, **options: Any) -> Any:
        """To ``iter_N`` in a folder; returns its request, if it is asynchronous."""
        checkpoint = folder / f"iter_{self.step:07d}"
        if dist.get_rank() == 0:
            checkpoint.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return dist_checkpointing.save(
            self.sharded_state_dict(), str(checkpoint), strategy, content_metadata=dict(self.metadata), **options
        )

    def load(self, checkpoint: Path, strategy: Any = None, *, with_generators: bool = True) -> dict[str, Any]:
        """From a checkpoint's folder; returns what was loaded."""
        self.metadata = dist_checkpointing.load_content_metadata(str(checkpoint))
        wanted = self.sharded_state_dict(is_loading=True)
        if not with_generators:  # on another number of ranks there are none
            del wanted["rng_state"], wanted["rerun_state_machine_state"]
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(checkpoint), strategy)
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.step = loaded["iteration"]
        if with_generators:
            (generators,) = loaded["rng_state"]
            random.setstate(generators["random"])
            np.random.set_state(generators["numpy"])
            torch.set_rng_state(generators["torch"])
            assert loaded["rerun_state_machine_state"] == {"mode": RerunMode.DISABLED, "rank": dist.get_rank()}
        return loaded


def newest(folder: Path) -> Path | None:
    """The newest folder that is a checkpoint."""
    found = [each for each in sorted(folder.glob("iter_*")) if dist_checkpointing.check_is_distributed_checkpoint(str(each))]
    return found[-1] if found else None


def _forward(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    losses = model(tokens, torch.arange(LENGTH)[None], mask, labels=tokens)
    return losses, lambda found: (found.float().mean(), {})


def leave() -> None:
    """Leaves together, so that no rank waits for one that has gone."""
    dist.barrier()
    dist.destroy_process_group()
