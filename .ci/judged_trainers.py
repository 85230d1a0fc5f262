"""The trainers' own tests that judge_trainers.py runs, and which of them must fail."""

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import NamedTuple


class Judged(NamedTuple):
    """The tests of one trainer."""

    tests: tuple[str, ...]
    """Files, folders and single tests of its sources, below `folder`."""
    kept: tuple[str, ...]
    """What they need of the sources: the beginnings of paths."""
    archive: str | None
    """Where the sources are; None: on PyPI."""
    fails: dict[str, str]
    """Name of a test, alone or with parameters in brackets -> why it fails by design."""
    left_out: dict[str, str]
    """Tests that are not run -> what they need."""
    looks_for_files: bool = False
    """Whether the tests are run once more, with the files there that those which fail look for, and must all pass then."""
    package: str | None = None
    """Its name on PyPI; None: the trainer's."""
    plugin: str = "stored_trainer"
    """A module of this folder that puts the adapter into the place of the trainer."""
    script: str | None = None
    """A script of this folder that runs the tests itself. It prints how each ended, its id, and why; then how many there were."""
    apart: bool = False
    """Whether it is in the environment of `make test-apart`."""
    folder: str = "."
    """In which pytest is run."""
    ranks: int = 1
    """How many processes run all tests together, under torchrun or by the script."""
    env: Mapping[str, str] = MappingProxyType({})
    """Added to the environment."""


TRANSFORMERS = Judged(
    tests=("tests/trainer/test_trainer_checkpointing.py",),
    kept=("tests/__init__.py", "tests/trainer/", "tests/fixtures/sample_text.txt", "tests/fixtures/tests_samples/"),
    archive="https://codeload.github.com/huggingface/transformers/tar.gz/refs/tags/v{version}",
    fails={
        "test_save_checkpoints": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
        "test_save_collator_tokenizer_by_default": "the tokenizer",
        "test_can_resume_training_lm": "weights, config, optimizer.pt, scaler.pt",
        "test_resume_training_with_shard_checkpoint": "weights: splits model.safetensors",
        "test_resume_training_with_checkpoint": "weights: splits model.safetensors",
        "test_resume_from_interrupted_training": "weights",
        "test_resume_batch_order": "weights: reads model.safetensors",
        "test_load_best_model_with_save_best": "weights: compares model.safetensors",
        "test_load_best_model_with_save": "weights: compares model.safetensors",
        "test_save_best_checkpoint": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
        "test_load_best_model_at_end": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
        "test_load_best_model_from_safetensors": "weights, config, optimizer.pt, scheduler.pt, training_args.bin",
    },
    left_out={
        "test_auto_batch_size_with_deepspeed": "DeepSpeed",
        "test_auto_batch_size_finder": "an example script and data sets of the Hub",
    },
    looks_for_files=True,
)

ACCELERATE = Judged(
    tests=("tests/test_state_checkpointing.py", "tests/test_data_loader.py", "tests/test_accelerator.py"),
    kept=("tests/",),
    archive=None,
    fails={},
    left_out={"test_free_memory_dereferences_prepared_components": "a machine whose free memory no other process changes"},
)

LIGHTNING = Judged(
    tests=(
        "tests/tests_pytorch/checkpointing/test_model_checkpoint.py",
        "tests/tests_pytorch/checkpointing/test_trainer_checkpoint.py",
        "tests/tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py",
        "tests/tests_pytorch/checkpointing/test_torch_saving.py",
    ),
    kept=(
        "tests/tests_pytorch/__init__.py",
        "tests/tests_pytorch/conftest.py",
        "tests/tests_pytorch/checkpointing/",
        "tests/tests_pytorch/helpers/",
    ),
    archive="https://codeload.github.com/Lightning-AI/pytorch-lightning/tar.gz/refs/tags/{version}",
    fails={
        "test_top_k": "counts calls of torch.save",
        "test_default_checkpoint_freq": "counts calls of torch.save",
        "test_default_checkpoint_behavior": "counts calls of trainer.save_checkpoint",
        "test_model_checkpoint_no_extraneous_invocations": "counts calls of trainer.save_checkpoint",
        "test_checkpointing_with_nan_as_first": "counts calls of trainer.save_checkpoint",
        "test_save_last_every_n_epochs_interaction": "counts calls of trainer.save_checkpoint",
        "test_save_last_saves_correct_last_model_path": "calls private methods for a save outside a run",
        "test_none_monitor_saves_correct_best_model_path": "calls private methods for a save outside a run",
        "test_model_torch_save_ddp_cpu": "pickles a callback over an open store",
        "test_model_torch_save": "pickles a callback over an open store",
        "test_pickling": "pickles a callback over an open store; one with the path of a store can be pickled",
    },
    left_out={},
)

FILES = "opens the files of a checkpoint"

DEEPSPEED = Judged(  # docs/trainers/deepspeed.md says which files are left out
    tests=tuple(
        f"unit/checkpoint/test_{name}.py"
        for name in (
            "tag_validation",
            "latest_checkpoint",
            "shared_weights",
            "convert_checkpoint",
            "other_optimizer",
            "lr_scheduler",
            "moe_checkpoint",
            "pipeline",
            "zero_optimizer",
            "universal_checkpoint",
        )
    ),
    kept=("tests/",),
    archive="https://codeload.github.com/deepspeedai/DeepSpeed/tar.gz/edaa7221267243c7be7fb49c5d5f5c4fb97b4641",
    fails={
        "test_checkpoint_shared_weights": FILES,
        "test_convert_zero_checkpoint_to_fp32_state_dict": FILES,
        "test_save_exclude_frozen_weights": FILES,
        "test_save_exclude_custom_frozen_weights": FILES,
        **{
            f"test_elastic_checkpoint_change_dp[True-{load}-{save}]": "expects that another number of ranks is refused"
            for load in (True, False)
            for save in (True, False)
        },
        **{
            f"test_dp_world_size_{ranks}[{size}-False-{adam}-3-dtype{dtype}]": f"{FILES}: DeepSpeed does, for the weights alone in ZeRO 3"
            for ranks, size, adam, dtype in product(("2to2", "4to2", "2to4"), (-1, 100), (False, True), (1, 2))
        },
    },
    left_out={},
    plugin="stored_deepspeed",
    apart=True,
    folder="tests",
    env={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "DEEPSPEED_TIMEOUT": "5", "OMP_NUM_THREADS": "1"},
)

NVRX = Judged(
    tests=("tests/checkpointing/unit/test_basic_local.py",),
    kept=("tests/",),
    archive="https://codeload.github.com/NVIDIA/nvidia-resiliency-ext/tar.gz/refs/tags/v{version}",
    fails={"test_find_latest_repl_disable": "makes files with names of NVRx's"},
    left_out={},
    package="nvidia-resiliency-ext",
    plugin="stored_nvrx",
    apart=True,
    ranks=2,
)

DCP = "looks for calls of dcp.save and dcp.async_save, for what they return, or for the files that they write"

TORCHTITAN = Judged(
    tests=("tests/unit_tests/test_checkpoint.py",),
    kept=("tests/",),
    archive="https://codeload.github.com/pytorch/torchtitan/tar.gz/862f966a34c5f78c721ccbb4835bf503d7be63f9",
    fails={
        "test_async_save_calls_maybe_wait_for_saving": DCP,
        "test_async_save_with_pinned_mem_assigns_staging_future": DCP,
        "test_enable_first_step_checkpoint": DCP,
        "test_interval_respects_interval": DCP,
        "test_last_save_model_only_and_initial_load_model_only": DCP,
        "test_load_only_prevents_saving": DCP,
        "test_non_persist_buffer_not_saved": DCP,
        "test_nonzero_rank_does_not_purge_or_save": DCP,
        "test_save_and_purge_keeps_last_k_checkpoints": DCP,
        "test_checkpointer_package_import_path": "compares the class or its options with torchtitan's own",
        "test_trainer_uses_checkpoint_interface_with_concrete_default": "compares the class or its options with torchtitan's own",
        "test_legacy_config_only_adds_dcp_specific_fields": "compares the class or its options with torchtitan's own",
    },
    left_out={},
    plugin="stored_torchtitan",
    apart=True,
)

MEGATRON = Judged(  # docs/trainers/megatron.md says which files are left out
    tests=tuple(
        f"tests/unit_tests/dist_checkpointing/{name}.py"
        for name in (
            "test_serialization",
            "test_fully_parallel",
            "test_async_save",
            "test_checkpointable",
            "test_nonpersistent",
            "test_msc",
            "test_pipeline_parallel_layout",
            "test_optimizer",
            "models/test_gpt_model",
            "models/test_bert_model",
            "models/test_t5_model",
            "models/test_moe_experts",
        )
    ),
    kept=("tests/", "megatron/"),
    archive="https://codeload.github.com/NVIDIA/Megatron-LM/tar.gz/refs/tags/core_v{version}",
    fails={
        "test_remove_sharded_tensors": "looks for files",
        **dict.fromkeys(
            (f"test_unexpected_keys_handling_during_validation[{validate}-torch_dist]" for validate in (True, False)),
            "wants an error of torch's, and Megatron's is raised",
        ),
        **dict.fromkeys(
            (
                "test_full_dp_reads",
                "test_singleton_dp_reads",
                "test_out_of_order_load",
                "test_cross_dp_access_does_not_disturb_the_distribution",
            ),
            "calls strategies without `dist_checkpointing`, which writes the common state",
        ),
        **dict.fromkeys(
            (f"test_async_is_equivalent_to_sync[{parallel}-True]" for parallel in (True, False)),
            "uses Megatron's persistent worker, a process that needs CUDA",
        ),
        "test_errors_are_reported": "breaks a writer of torch_dist's",
        **dict.fromkeys(
            (f"test_optimizer_common_state_dict[tp_pp_ep2-False-True-False-kwargs2-{parallel}]" for parallel in (True, False)),
            "needs the Transformer Engine for multi-latent attention",
        ),
        **dict.fromkeys(
            (
                f"test_nonreshardable_optimizer_save_load[initialize_pp_agnostic_model-src_tp_pp{case}-dest_tp_pp{case}-fully_reshardable-{way}]"
                for case, way in ((0, False), (3, False), (4, True))
            ),
            "fails on CPUs with torch_dist, too",
        ),
    },
    left_out={},
    package="megatron-core",
    script="judge_megatron.py",
    apart=True,
    ranks=8,
)

JUDGED = {
    "transformers": TRANSFORMERS,
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "deepspeed": DEEPSPEED,
    "megatron": MEGATRON,
    "nvrx": NVRX,
    "torchtitan": TORCHTITAN,
}
