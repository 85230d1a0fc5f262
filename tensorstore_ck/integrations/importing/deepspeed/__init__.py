"""Folders of DeepSpeed: of its engines, universal ones, and of the trainers that use it.

folder.py      the folder of a step, or a universal one, as the state that `tensorstore_ck.deepspeed` saves
trainers.py    folders of transformers' Trainer and accelerate that trained with DeepSpeed
files.py       the files in them
partitions.py  where each parameter's elements lie in DeepSpeed's flat tensors
experts.py     MoE experts in its files
pipeline.py    layers of pipelines in its files
universal.py   a parameter's files in its universal checkpoints
unnamed.py     names for the optimizer of a checkpoint without ZeRO
classes.py     DeepSpeed's classes as plain values
"""
