"""One or more runs of every command, on a store with the branch runs/gpt."""

from typing import Final

import click

from tensorstore_ck.cli import main

RUNS: Final[dict[str, list[list[str]]]] = {
    "init": [["init"]],
    "put": [["put", "model.safetensors", "--ref", "runs/other"]],
    "get": [["get", "runs/gpt", "out.safetensors"]],
    "import": [["import", "model.safetensors", "--ref", "runs/imported"]],
    "export": [
        ["export", "runs/gpt", "out.pt"],
        ["export", "runs/gpt", "--to", "safetensors", "stripped", "--include", "model.*", "--strip-prefix", "model."],
        ["export", "runs/gpt", "--to", "hf", "folder"],
    ],
    "log": [["log"], ["log", "runs/gpt"]],
    "show": [["show", "runs/gpt"], ["show", "runs/gpt", "--stats"]],
    "diff": [["diff", "runs/gpt~1", "runs/gpt"], ["diff", "runs/gpt~1", "runs/gpt", "--stats"]],
    "bisect": [["bisect", "runs/gpt", "--metric", "val_loss < 2.4"]],
    "branch": [["branch"], ["branch", "runs/two", "runs/gpt"]],
    "reset": [["reset", "runs/two", "runs/gpt~1"]],
    "tag": [["tag"], ["tag", "v1", "runs/gpt"]],
    "untag": [["untag", "v1"]],
    "annotate": [["annotate", "runs/gpt", "loss=1"]],
    "mark": [["mark", "runs/gpt", "--reason", "it is bad"]],
    "usage": [["usage"]],
    "advise": [["advise", "runs/gpt", "--stall", "1s"]],
    "plan": [["plan", "--params", "7B", "--gbps", "1"]],
    "watch": [["watch", "runs/gpt", "--count", "1", "--since-step", "0"]],
    "follow": [["follow", "runs/gpt", "--to", "served", "--count", "1"]],
    "catalog": [["catalog", "sync", "--db", "catalog.sqlite"], ["catalog", "show", "--db", "catalog.sqlite"]],
    "find": [["find", "step > 0", "--db", "catalog.sqlite"]],
    "ui": [["ui", "--help"]],  # else it runs until it is interrupted; see tests/ui
    "exporter": [["exporter", "--help"]],  # the same; see tests/integrations/prometheus
    "pin": [["pin", "runs/gpt", "--owner", "me", "--reason", "why"]],
    "unpin": [["unpin", "runs/gpt", "--owner", "me"]],
    "policy": [["policy", "set", "runs/*", "keep_last=5"], ["policy"]],
    "quota": [["quota", "set", "runs/*", "--warn", "1TB"], ["quota"]],
    "forget": [["forget", "runs/two"], ["forget"]],
    "undo": [["undo"]],
    "gc": [["gc"]],
    "recode": [["recode", "runs/gpt"]],
    "tier": [["tier"]],
    "staging": [["staging", "--staging", "stage"]],
    "copy": [["copy", "ck", "copied"]],
    "keygen": [["keygen", "release"]],
    "sign": [["sign", "runs/gpt", "--sign", "release.key"]],
    "verify": [["verify", "runs/gpt", "--trust", "trust.toml"]],
    "prove": [
        ["prove", "runs/gpt", "model.a", "--out", "a.proof", "--force"],
        ["prove", "--check", "a.proof"],
        ["prove", "--contains", "runs/gpt~1", "runs/gpt"],
    ],
    "verify-files": [["verify-files", "--help"]],  # it needs a key; see tests/integrations/test_model_signature.py
    "fsck": [["fsck"], ["fsck", "--read-data"]],
    "verify-resume": [["verify-resume", "runs/gpt"]],
    "salvage": [["salvage", "--dry-run"]],
    "probe": [["probe"]],
    "doctor": [["doctor"]],
    "accept-log": [["accept-log"]],
    "adopt": [["adopt"]],
    "completion": [["completion", "bash"], ["completion", "zsh"]],
}


def commands() -> dict[str, click.Command]:
    """All of them, by name."""
    root = main
    assert isinstance(root, click.Group)
    context = click.Context(root)
    found = {name: root.get_command(context, name) for name in root.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def runs() -> list[list[str]]:
    """All of them, as people and as programs run them."""
    assert set(RUNS) == set(commands())
    return [[*arguments, *form] for each in RUNS.values() for arguments in each for form in ([], ["--json"])]
