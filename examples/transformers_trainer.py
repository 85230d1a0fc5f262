"""transformers' Trainer over a store: ``python -m examples.transformers_trainer FOLDER [STEPS]``, and the same again after a kill.

What differs from a script without a store is the name of the class, `store=` and `ref=`.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import tensorstore_ck as tsck

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))
LENGTH = 16


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text."""

    def __init__(self) -> None:
        self._letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])

    def __len__(self) -> int:
        return len(self._letters) // LENGTH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        piece = self._letters[number * LENGTH : (number + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


def main(folder: Path, steps: int) -> None:
    """Trains up to `steps`, from the newest snapshot if there is one."""
    set_seed(1)
    config = GPT2Config(vocab_size=len(LETTERS), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tsck.open(folder / "store", create=True) as store:
        trainer = tsck.hf.Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=str(folder / "out"),
                max_steps=steps,
                learning_rate=0.01,
                lr_scheduler_type="constant",
                logging_steps=10,
                save_steps=20,
                save_total_limit=2,
                report_to=[],
                use_cpu=True,
            ),
            train_dataset=Windows(),
            store=store,
            ref="runs/fox",
        )
        trainer.train(resume_from_checkpoint="auto")
        for snapshot in store.log("runs/fox"):
            print(f"runs/fox@{snapshot.step}  loss {snapshot.metrics['loss']:.4f}  {snapshot.root[:12]}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=60)
    given = options.parse_args()
    main(given.folder, given.steps)
