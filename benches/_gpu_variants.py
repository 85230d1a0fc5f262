"""Variants of one training loop with saves, in one process; where the time of a call goes."""
import json, sys, time, threading, statistics, functools
from pathlib import Path
import torch
from benches import _gpu_loop as L
from benches._gpu_steps import Saves, opened
from tensorstore_ck.engine.write import part_writer
from tensorstore_ck.session.save import save as save_module, save_queue
from tensorstore_ck.state import capture_copy
from tensorstore_ck.state.device import capture_proofs, side_streams, device_blocks, step_gates
spent = {}
def timed(owner, name, label):
    original = getattr(owner, name)
    @functools.wraps(original)
    def call(*a, **k):
        t = time.perf_counter()
        try: return original(*a, **k)
        finally: 
            if threading.current_thread() is threading.main_thread(): spent[label] = spent.get(label, 0) + (time.perf_counter() - t) * 1e3
    setattr(owner, name, call)
timed(save_module.Save, "check_branch", "branch"); timed(save_module.Save, "capture", "capture"); timed(save_module.Save, "copy_into", "copy_into")
timed(capture_proofs, "start_copies", "start_copies"); capture_copy.start_copies = capture_proofs.start_copies
timed(device_blocks.DeviceBlocks, "start", "ids"); timed(side_streams.SideStreams, "start", "copies"); timed(step_gates.StepGate, "_before_step", "hook"); timed(save_queue.SaveQueue, "_admit", "admit"); timed(device_blocks, "_hash", "hash"); timed(capture_proofs, "open_storages", "gates")
held = []
hold = step_gates.StepGate.hold
step_gates.StepGate.hold = lambda gate, arrival: (held.append(1), hold(gate, arrival))[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
shape = L.LARGE if device == "cuda" else L.SMALL
def main(folder):
    torch.manual_seed(0)
    model = L.Model(shape).to(device); optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    def step():
        words = torch.randint(shape.words, (shape.batch, shape.length), device=device)
        with torch.autocast(device, dtype=torch.bfloat16): loss = model(words)
        loss.backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(4): step()
    state = {f"model.{n}": v.detach() for n, v in model.named_parameters()}
    for n, each in optimizer.state_dict()["state"].items(): state |= {f"optimizer.{n}.{k}": v for k, v in each.items()}
    with opened(folder, codec="raw") as store:
        saves = Saves(store); t = time.perf_counter(); saves.prepare(state, optimizer); print(json.dumps({"prepare ms": round((time.perf_counter() - t) * 1e3)}), flush=True)
        every = 15 if device == "cuda" else 3
        def interval(put):
            sync(); t = time.perf_counter(); call = None
            for n in range(every):
                step()
                if n == (3 if every > 3 else 1) and put: 
                    spent.clear(); c = time.perf_counter(); pending = put(); call = (time.perf_counter() - c) * 1e3; calls = {k: round(v, 1) for k, v in spent.items()}; t0 = time.perf_counter()
                    threading.Thread(target=lambda: (pending.wait(), durable.append(round(time.perf_counter() - t0, 2))), daemon=True).start()
            cpu = (time.perf_counter() - t) * 1e3; sync(); total = (time.perf_counter() - t) * 1e3
            if put: pending.wait(); return total, call, calls, spent.get("hook"), cpu
            return total, cpu
        durable = []
        time.sleep(3 if device == "cuda" else 0.1)
        base = [interval(None) for _ in range(2)]; alone = min(b[0] for b in base)
        print(json.dumps({"interval alone ms, and of the CPU": [[round(x, 1) for x in b] for b in base], "step ms": round(alone / every, 1)}), flush=True)
        threads = part_writer._threads
        gate = threading.Event()
        run = save_module.Save.run
        def later(self, status): gate.wait(30); return run(self, status)
        for name, count, overlapped, is_stored in (("overlap, nothing stored meanwhile", 8, True, False), ("at once, nothing stored meanwhile", 8, False, False), ("overlap, 17 threads", 17, True, True), ("overlap, 8 threads", 8, True, True), ("at once, 8 threads", 8, False, True), ("overlap, 4 threads", 4, True, True)):
            part_writer._threads = lambda _, count=count: count
            added, calls, parts, n = [], [], [], len(held); durable.clear()
            for _ in range(2 if not is_stored else 3):
                save_module.Save.run = run if is_stored else later
                gate.clear()
                def put():
                    return saves.put_async(state, *([optimizer] if overlapped else []))
                if is_stored: got = interval(put)
                else:
                    threading.Timer(every * alone / every / 1e3 * 2, gate.set).start(); got = interval(put)
                added.append(round(got[0] - alone, 1)); calls.append(round(got[1], 1)); parts.append({**got[2], "hook": got[3] and round(got[3], 1), "cpu": round(got[4])})
            print(json.dumps({name: {"added ms": added, "calls ms": calls, "durable s": durable[:], "overlapped": len(held) - n, "parts": parts}}), flush=True)
main(Path(sys.argv[1]))
