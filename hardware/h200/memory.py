"""The smallest cases under CUDA's memory checker, where there is one; without it they run and are compared, and it says so."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from forebay.hardware.checking.cases import CASES
from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.running import run_process

TOOL: Final = "compute-sanitizer"
FOUND_ERRORS: Final = 99
"""The exit status that the tool is asked for where it found something."""


def run(task: Task) -> Result:
    """Fails by what the tool finds, by a value that is wrong, or by a case that does not end."""
    tool = None if task.dry else find_tool(task.tools)
    command = [sys.executable, "-m", "forebay.hardware.checking.cases", task.backend]
    if tool is not None:
        # Blocks of torch's cache would hide what lies beyond a tensor.
        checker = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND_ERRORS)]
        command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *checker, *command]
    ended = run_process(command, task.left_s - 3, task.work / "cases.log")
    print(ended.output)
    over = [case for case in CASES if f"ended: {case}\n" in ended.output]
    data = {"tool": tool or "not present", "cases": list(CASES), "ended": over}
    if ended.status is None:
        return "over its time", data, [f"{len(over)} of {len(CASES)} cases ended in time"]
    if ended.status == FOUND_ERRORS and tool is not None:
        return "failed", data, [f"{TOOL} found errors: {ended.output[-600:]}"]
    if ended.status != 0 or len(over) != len(CASES):
        return "failed", data, [f"the cases ended with status {ended.status}, {len(over)} of {len(CASES)} of them"]
    if tool is None:
        why = "dry run" if task.dry else f"neither on PATH nor in {task.tools}"
        return "not present", data, [f"{TOOL}: {why}; values were compared, memory was not watched"]
    return "passed", data, []


def find_tool(tools: Path) -> str | None:
    """The checker's path: on PATH, or in ``bin`` or a folder of its own below ``tools``."""
    places = (None, str(tools / "bin"), str(tools / TOOL))
    return next((found for place in places if (found := shutil.which(TOOL, path=place))), None)
