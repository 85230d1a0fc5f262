"""An adapter of peft in a bucket: the page's first example, killed and started again, looked at, exported, and loaded by peft."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

from tests.end_to_end.walks.walk import Walk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.s3,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft
]

TRAIN = """
import sys
import torch, transformers
from peft import LoraConfig, get_peft_model
import tensorstore_ck as tsck

url, steps, kill, base = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, number):
        words = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}

class Kill(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == kill:
            raise SystemExit(9)

transformers.set_seed(7)
model = transformers.GPT2LMHeadModel.from_pretrained(base)
model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
args = transformers.TrainingArguments(
    "out", per_device_train_batch_size=2, max_steps=steps, save_steps=4, logging_steps=4, report_to=[], use_cpu=True, disable_tqdm=True
)
trainer = tsck.hf.Trainer(model=model, args=args, train_dataset=Sentences(), callbacks=[Kill()], store=url, ref="runs/lora")
trainer.train(resume_from_checkpoint="auto")
print("ended at", trainer.state.global_step)
torch.save({name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}, "trained.pt")
"""
KILLED = 9


def test_an_adapter_in_a_bucket(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk(tmp_path, monkeypatch) as walk:
        Path("train.py").write_text(TRAIN)
        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=256, n_layer=2, n_head=2, loss_type="ForCausalLMLoss")
        for seed in (1, 2):
            torch.manual_seed(seed)
            GPT2LMHeadModel(config).save_pretrained(f"base{seed}")
        base_bytes = Path("base1/model.safetensors").stat().st_size

        # killed at step 9, and started again by the same line
        first = walk.python("train.py", url, "12", str(KILLED), "base1", code=KILLED)
        assert "hold the adapter alone" in first.text
        assert "base1" in first.text
        assert "ended at 12" in walk.python("train.py", url, "12", "0", "base1").text
        trained = torch.load("trained.pt", weights_only=True)

        # what is in the bucket: three snapshots, that are small beside the base
        rows = walk.type(f"tsck log runs/lora -s {url}").lines[1:]
        assert [row.split()[1] for row in rows] == ["12", "8", "4"]
        usage = walk.type(f"tsck usage --json -s {url}").text
        (stored,) = re.findall(r'"objects_bytes": (\d+)', usage)
        assert int(stored) < base_bytes / 2
        assert "base_model" in walk.type(f"tsck show runs/lora -s {url}").text

        # another base is refused, and nothing is restored
        other = walk.python("train.py", url, "16", "0", "base2", code=1)
        assert "MismatchError" in other.text
        assert "base" in other.lines[-2]
        walk.follow_all(other, DIR="adapter")
        assert walk.type(f"tsck log runs/lora -s {url}").lines[1:] == rows

        # the error named the way out: a folder for peft, with the same weights
        loaded = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained("base1"), "adapter").state_dict()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())
