"""The chips that the gate compiles for, and what a compiled program takes of one: the TPU's own compiler runs without a TPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any, Final

import jax
from jax.experimental import topologies

TARGETS: Final = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}
"""Topologies as libtpu names them, by generation."""
KERNEL: Final = "tpu_custom_call"
"""How a Pallas kernel stands in a compiled program."""
_VECTOR_MEMORY: Final = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')
_ALIASED: Final = re.compile(r"input_output_alias=\{(.*?)\}, entry_computation_layout")
_COPY: Final = re.compile(r"= \(?\w+\[([\d,]+)\].* (?:copy|copy-start|transpose)\(")


@dataclass(frozen=True)
class Usage:
    """What a compiled program takes of a chip.

    Attributes:
        temporaries: bytes of the device's memory beside arguments and results.
        arguments: bytes of them, as the chip lays them out.
        others: bytes of those that are no layer of a pool, without what a layout adds.
        donated: how many arguments it may take over; aliased: how many of these a result shares its memory with.
        copies: operations that copy or transpose a whole layer of a pool, wherever the copy lies.
        kernels: Pallas kernels in it.
        vector: bytes of vector memory of the one that takes most; 0 where there is none.
        code: bytes.
    """

    temporaries: int
    arguments: int
    others: int
    donated: int
    aliased: int
    copies: int
    kernels: int
    vector: int
    code: int


@dataclass(frozen=True)
class Refused:
    """What the compiler says of a program that it does not compile: its first line."""

    error: str


def libtpu() -> str | None:
    """The version of libtpu, which has the compiler; None where there is none."""
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return None


@cache
def device(target: str) -> Any:
    """A chip to compile for; nothing is looked for on this host."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no questions to a metadata server
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_WORKER_ID"] = "0"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"  # of a host that is none; the topology says for what is compiled
    os.environ["TPU_LOG_DIR"] = "disabled"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # the lock is for devices
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(TARGETS[target], platform="tpu").devices[0]


def measured(compile_for: Callable[[Any], Any], target: str, layer: int) -> Usage | Refused:
    """Compile for a chip, and measure what came out.

    Args:
        compile_for: gives a ``jax.stages.Compiled`` for a device.
        target: a name of :data:`TARGETS`.
        layer: elements of a layer of a pool among the arguments; 0 where there is none.
    """
    chip = device(target)
    try:
        made = compile_for(chip)
    except Exception as error:  # noqa: BLE001  (whatever a compiler refuses with is the finding, not a failure of the gate)
        # Without places of this machine: the same refusal reads the same everywhere.
        said = re.sub(r" at /\S*", "", str(error).strip().partition("\n")[0])
        return Refused(f"{type(error).__name__}: {said[:300] or 'no message'}")
    memory, text = made.memory_analysis(), made.as_text()
    given = jax.tree.leaves(made.args_info)
    donated = [x.donated for x in given]
    return Usage(
        temporaries=int(memory.temp_size_in_bytes),
        arguments=int(memory.argument_size_in_bytes),
        others=sum(prod(x.shape) * x.dtype.itemsize for x in given if prod(x.shape) != layer),
        donated=sum(donated),
        aliased=len({i for i in aliased(text) if donated[i]}),
        copies=sum(prod(map(int, shape.split(","))) == layer for shape in _COPY.findall(text)),
        kernels=text.count(f'custom_call_target="{KERNEL}"'),
        vector=max(
            (int(size) for line in text.splitlines() if KERNEL in line for size in _VECTOR_MEMORY.findall(line)),
            default=0,
        ),
        code=int(memory.generated_code_size_in_bytes),
    )


def aliased(text: str) -> list[int]:
    """Numbers of the arguments whose memory results take over, in the text of a compiled program."""
    found = _ALIASED.search(text.partition("\n")[0])
    return [] if found is None else [int(number) for number in re.findall(r": \((\d+),", found[1])]
