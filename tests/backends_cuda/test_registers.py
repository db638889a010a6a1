"""What a device launches a kernel with is what the ahead-of-time gate compiles it with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.backends.cuda.device import CudaPlatform
from forebay.backends.cuda.registers import launch_options

CONSTANTS = {
    "D_MAIN": 128,
    "D_REST": 0,
    "V_REST": 0,
    "USE_DOT": True,
    "IN_FLOAT32": True,
    "SINGLE_QUERY": True,
    "num_warps": 8,
    "num_stages": 2,
}


def arguments(keys: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.empty(1, device="meta"), torch.empty(1, device="meta", dtype=keys)


class Kernel:
    """Keeps what it is launched with."""

    def __init__(self, name: str) -> None:
        self.fn = SimpleNamespace(__name__=name)
        self.launched: list[tuple[Any, Any, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launched.append((grid, args, constants))


@pytest.mark.parametrize("compiler", ["cuda", "hip"])
@pytest.mark.parametrize("name", ["decode_kernel", "reduce_kernel", "merge_kernel"])
@pytest.mark.parametrize("width", [128, 512])
def test_a_device_launches_with_the_options_of_the_gate(compiler: str, name: str, width: int) -> None:
    platform = CudaPlatform.__new__(CudaPlatform)  # there is no device to open
    platform._compiler = compiler
    kernel, args, constants = Kernel(name), arguments(torch.bfloat16), {**CONSTANTS, "D_MAIN": width, "V_REST": 64}
    platform.launch(kernel, (3, 1), *args, **constants)
    assert kernel.launched == [((3, 1), args, {**constants, **launch_options(name, args, constants, compiler)})]
    platform.launch(kernel, (3, 0), *args, **constants)
    assert len(kernel.launched) == 1


def test_registers_fit_the_file_and_float32_keys_keep_their_stages() -> None:
    mixed = launch_options("decode_kernel", arguments(torch.bfloat16), CONSTANTS, "cuda")
    assert mixed == {"num_warps": 8, "maxnreg": 255, "num_stages": 1}
    alike = launch_options("decode_kernel", arguments(torch.float32), CONSTANTS, "cuda")
    assert alike == {"num_warps": 8, "maxnreg": 255}
    many = {**CONSTANTS, "num_warps": 16}
    assert launch_options("decode_kernel", arguments(torch.float32), many, "cuda") == {"num_warps": 16, "maxnreg": 128}


def test_latent_float32_takes_four_warps_on_amd_alone() -> None:
    latent = {**CONSTANTS, "D_MAIN": 512, "D_REST": 64}
    assert launch_options("decode_kernel", arguments(torch.float32), latent, "hip") == {"num_warps": 4}
    assert launch_options("decode_kernel", arguments(torch.float32), CONSTANTS, "hip") == {}


def test_several_queries_in_two_small_tiles_have_one_stage_and_one_query_is_left_alone() -> None:
    small = {**CONSTANTS, "D_MAIN": 64, "D_REST": 16, "IN_FLOAT32": False, "num_warps": 4}
    several = {**small, "SINGLE_QUERY": False}
    assert launch_options("decode_kernel", arguments(torch.bfloat16), small, "cuda") == {}
    pieces = launch_options("decode_kernel", arguments(torch.bfloat16), several, "cuda")
    assert pieces == {"num_warps": 4, "maxnreg": 255, "num_stages": 1}
    wide = {**several, "D_MAIN": 256, "D_REST": 0}
    assert launch_options("decode_kernel", arguments(torch.bfloat16), wide, "cuda") == {"num_warps": 8, "maxnreg": 255}


def test_several_queries_in_float32_have_one_stage() -> None:
    several = {**CONSTANTS, "SINGLE_QUERY": False}
    assert launch_options("decode_kernel", arguments(torch.float32), several, "cuda")["num_stages"] == 1
    assert "num_stages" not in launch_options(
        "decode_kernel", arguments(torch.float32), {**several, "D_MAIN": 64}, "cuda"
    )
