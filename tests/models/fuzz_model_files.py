"""Mutated model files: each loads and generates, or is refused by name, without a crash, a hang or a large allocation.

``python -m tests.models.fuzz_model_files --count 10000`` prints one JSON object; ``--case N`` repeats one mutation. A mutation
is fixed by the seed and its number. While a file is opened the process may take 64 MiB of address space above the size of
the model's files; more is a MemoryError, which fails like any other error that is not a refusal.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from forebay.runtime import Engine, Model, SamplingParams, open_backend
from forebay.runtime.models import ModelFolder, expected_tensors, open_model
from forebay.specs.backend import Backend
from forebay.specs.errors import ForebayError, InvalidInput, InvalidModel, Unsupported
from tests.models import mutations, tiny
from tests.models.mutations import Mutation, changed_json, changed_safetensors, damaged, nudged_json

ALLOWANCE = 64 * 2**20
SECONDS = 10
"""For one mutation: what takes longer counts as a hang."""

CHAT = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"

ROPED = {
    "model_type": "mistral",
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One file of one model, and how it is damaged. ``opened``: what is given to ``open_model``."""

    name: str
    opened: Path
    file: Path
    mutations: tuple[Mutation, ...]


def write_targets(root: Path) -> list[Target]:
    """Write a tiny model in every form that can be loaded; the files that are damaged, one at a time."""
    whole = tiny.write_folder(root / "whole")
    (whole / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT, "bos_token": "<|start|>", "eos_token": {"content": "<|stop|>"}})
    )
    (whole / "chat_template.jinja").write_text(CHAT)
    sharded = tiny.write_folder(root / "sharded", shards=3)
    roped = tiny.write_folder(root / "roped")
    (roped / "config.json").write_text(json.dumps({**tiny.CONFIG, **ROPED}))
    targets = [Target("model.safetensors", whole, whole / "model.safetensors", (changed_safetensors, _header(4000)))]
    texts = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    targets += [Target(name, whole, whole / name, (changed_json, nudged_json, damaged)) for name in texts]
    targets.append(Target("config.json of a rope", roped, roped / "config.json", (changed_json, nudged_json, damaged)))
    targets.append(Target("chat_template.jinja", whole, whole / "chat_template.jinja", (damaged,)))
    index = sharded / "model.safetensors.index.json"
    targets.append(Target(index.name, sharded, index, (changed_json, nudged_json, damaged)))
    shard = sharded / "model-00002-of-00003.safetensors"
    targets.append(Target("shard", sharded, shard, (changed_safetensors, _header(2000))))
    for name, file, first in _write_gguf_files(root):
        targets.append(Target(name, first, file, (mutations.GGUFNumbers(file), _header(9000), damaged)))
    return targets


def _header(region: int) -> Mutation:
    return lambda content, draw: damaged(content, draw, region)


def _write_gguf_files(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name, the file that is damaged and the file that is opened."""
    tensors = tiny.gguf_tensors(tiny.weights())
    plain = tiny.write_gguf(root / "plain.gguf", tensors, metadata={"tokenizer.chat_template": CHAT})
    yield "gguf", plain, plain
    q8, bf16 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16
    kinds = {name: q8 if "ffn" in name else bf16 for name, values in tensors.items() if values.ndim == 2}
    divisors = {"rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32)}
    pieces = tiny.sentencepiece_metadata()
    embedding = np.resize(tensors["token_embd.weight"], (len(pieces["tokenizer.ggml.tokens"]), 64))
    few = tensors | divisors | {"token_embd.weight": embedding}
    quantised = tiny.write_gguf(root / "quantised.gguf", few, metadata=pieces, kinds=kinds)
    yield "gguf quantised", quantised, quantised
    first = tiny.write_gguf(root / "split.gguf", tensors, shards=2)
    yield "gguf first shard", first, first
    yield "gguf second shard", first.with_name("split-00002-of-00002.gguf"), first


def use(backend: Backend, model: ModelFolder) -> None:
    """Read and run every part of an opened model; raises what a model that was accepted may not raise."""
    for name, shape in expected_tensors(model.config).items():
        for dtype in ("float32", "bfloat16"):
            model.weights.tensor(name, shape, dtype)
    model.tokenizer.decode(model.tokenizer.encode("hello world 42"))
    with suppress(InvalidInput):  # A template is a program: it may fail, or not be there any more.
        model.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    limits: dict[str, Any] = {"max_len": 16, "slots": 1, "num_blocks": 4, "block_size": 8, "capture": "off"}
    engine = Engine(Model("fuzz", model, "float32"), backend, **limits)
    try:
        engine.generate([[0, 1, 0]], SamplingParams(max_tokens=2, ignore_eos=True))
    finally:
        engine.close()


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let the process take ``nbytes`` of address space more than it has; more is a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Hang(Exception):
    """One mutation took too long."""


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise Hang(f"more than {SECONDS} s")


@dataclass
class Report:
    """What became of the mutations: by target, then by outcome; and those that failed."""

    outcomes: dict[str, Counter[str]]
    failures: list[str]
    slowest_s: float = 0.0

    def as_data(self) -> dict[str, Any]:
        total = sum((Counter(each) for each in self.outcomes.values()), Counter[str]())
        return {
            "mutations": total.total(),
            "outcomes": dict(total),
            "by_target": {name: dict(each) for name, each in self.outcomes.items()},
            "slowest_s": round(self.slowest_s, 3),
            "failures": self.failures,
        }


def run(cases: Sequence[int], seed: int, root: Path) -> Report:
    """Mutate and load, one case after another; ``root/current`` names the one under way, should the process die."""
    targets = write_targets(root)
    report = Report({target.name: Counter() for target in targets}, [])
    signal.signal(signal.SIGALRM, _hang)
    with open_backend("cpu") as backend:
        for target in targets:
            use(backend, open_model(target.opened))  # all must load undamaged; and what is loaded once is loaded
        for case in cases:
            target = targets[case % len(targets)]
            draw = random.Random(f"{seed}:{case}")  # noqa: S311  (repeatable damage, not cryptography)
            original = target.file.read_bytes()
            target.file.write_bytes(draw.choice(target.mutations)(original, draw))
            (root / "current").write_text(f"--seed {seed} --case {case}")
            start = time.monotonic()
            try:
                outcome = _attempt(backend, target)
            except BaseException as error:  # noqa: BLE001  (whatever it is, it is a finding)
                report.failures.append(
                    f"--seed {seed} --case {case} ({target.name}): {type(error).__name__}: {error}"[:400]
                )
                outcome = "failed"
            report.slowest_s = max(report.slowest_s, time.monotonic() - start)
            report.outcomes[target.name][outcome] += 1
            target.file.write_bytes(original)
    return report


def _attempt(backend: Backend, target: Target) -> str:
    size = sum(file.stat().st_size for file in target.file.parent.iterdir() if file.is_file())
    signal.alarm(SECONDS)
    try:
        try:
            with limited(ALLOWANCE + size):
                model = open_model(target.opened)
        except (InvalidModel, Unsupported) as error:
            if str(target.opened.parent) not in str(error):
                raise RuntimeError(f"a refusal that names no file: {error}") from error
            return type(error).__name__
        try:
            use(backend, model)
        except ForebayError as error:
            return f"accepted, then {type(error).__name__}"
        return "accepted"
    finally:
        signal.alarm(0)


def main() -> int:
    """Run the mutations that the command line asks for; 1 where one failed."""
    faulthandler.enable()
    os.environ["RUST_BACKTRACE"] = "0"  # a backtrace of Rust's takes more memory than the limit leaves
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this mutation alone and keep its files")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="fuzz-model-files-"))
    start = time.monotonic()
    report = run(range(options.count) if options.case is None else [options.case], options.seed, root)
    print(json.dumps(report.as_data() | {"seconds": round(time.monotonic() - start, 1)}, indent=1))
    shutil.rmtree(root)
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
