"""Adapters for other systems and file formats, built on `Store` and the layers below it.

dcp/                     torch.distributed.checkpoint over a store
importing/               checkpoints of other libraries -> snapshots
exporting/               snapshots -> files of other programs
accelerate/              accelerate's Accelerator over a store
hf/                      transformers' Trainer over a store
torch_checkpointing/     torch_checkpointing's CheckpointManager over a store
lightning/               Lightning's Trainer and Fabric over a store
deepspeed/               DeepSpeed's engine over a store
deepspeed_names.py       what snapshots of its engines are made of
ray/                     Ray Train over a store
titan/                   torchtitan's checkpoint manager over a store
weight_names/            weights of Hugging Face under the names of Megatron-core, and back
megatron_layout.py       how a state of Megatron-core lies in a snapshot
held_engine.py           the DeepSpeed engine that a trainer may hold
trainer/                 what the adapters of trainers have in common
trainer_names.py         what snapshots of transformers' Trainer and accelerate have for each rank
mlflow.py                where a snapshot is, noted in a run of MLflow
wandb.py                 the same, as an artifact of Weights & Biases
tracked_snapshots.py     what both note of a snapshot, and the pin that keeps it
filesystem.py            ``tsck://``: snapshots as a read-only fsspec filesystem
virtual_safetensors.py   the ``.safetensors`` files in it, whose bytes are made when they are read
safetensors_format.py    dtypes and limits of the safetensors format
crc32.py                 the CRC-32 of bytes that were summed in pieces
model_signature.py       signatures of exported folders, as model-signing writes and verifies them
model_file_names.py      files next to a model's weights
prometheus/              a Prometheus endpoint over several stores
otel.py                  OpenTelemetry metrics and spans of saves
follower_metrics.py      Prometheus metrics of a follower, in its own process

Each imports the system that it adapts, so nothing is imported unless it is used by its full name.
"""
