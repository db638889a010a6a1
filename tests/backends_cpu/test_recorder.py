"""What torch itself offers and a captured step on the ``cpu`` backend may not use (clause C2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from forebay.specs import Backend, CaptureViolation, Segment

CLOSED = torch.arange(4, dtype=torch.float32)

FORBIDDEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "zeros": (lambda x: x + torch.zeros(4), "creates an array"),
    "ones": (lambda x: x + torch.ones(4), "creates an array"),
    "full": (lambda x: x + torch.full((4,), 2.0), "creates an array"),
    "empty": (lambda x: torch.empty(4), "creates an array"),
    "arange": (lambda x: x + torch.arange(4), "creates an array"),
    "rand": (lambda x: x + torch.rand(4), "random numbers"),
    "rand_like": (lambda x: torch.rand_like(x), "random numbers"),
    "dropout": (lambda x: torch.nn.functional.dropout(x), "random numbers"),
    "tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "made on the host"),
    "from_numpy": (lambda x: x + torch.from_numpy(np.ones(4, np.float32)), "made on the host"),
    "a closed-over tensor": (lambda x: x + CLOSED, "closed over"),
    "a closed-over tensor alone": (lambda x: CLOSED, "closed over"),
    "add_": (lambda x: x.add_(1), "in place"),
    "zero_": (lambda x: x.zero_(), "in place"),
    "copy_": (lambda x: x.copy_(x + 1), "in place"),
    "clamp_ of a temporary": (lambda x: (x + 1).clamp_(0, 1), "in place"),
    "out=": (lambda x: torch.add(x, 1, out=x), "in place"),
    "index_put_": (lambda x: x.index_put_((x > 1,), x[0]), "in place|mask"),
    "numpy()": (lambda x: x.numpy(), "host read"),
    "item()": (lambda x: x.sum().item(), "host read"),
    "data_ptr()": (lambda x: x.data_ptr(), "host read"),
    "equal": (lambda x: torch.equal(x, x), "host"),
    "nonzero": (lambda x: torch.nonzero(x), "host"),
    "masked_select": (lambda x: torch.masked_select(x, x > 1), "host"),
    "unique": (lambda x: torch.unique(x), "host"),
    "a mask": (lambda x: x[x > 1], "mask"),
    "tolist()": (lambda x: x.tolist(), "host read"),
    "tensor_split by a tensor": (lambda x: torch.tensor_split(x, x[:1].to(torch.int64))[0], "host read"),
}


@pytest.mark.clause("C2", "C12")
@pytest.mark.parametrize("name", FORBIDDEN)
def test_torch_cannot_reach_around_the_capture(backend: Backend, name: str) -> None:
    act, says = FORBIDDEN[name]
    x = backend.buffer("x", np.arange(4, dtype=np.float32))

    def fn(_: Backend) -> Any:
        made = act(x.get())
        return {}, ({"made": made} if isinstance(made, torch.Tensor) else {})

    with pytest.raises(CaptureViolation, match=f"({says}).*while capturing Segment reach"):
        backend.capture(Segment("reach", fn, reads=(x,)))
    np.testing.assert_array_equal(backend.fetch(x), np.arange(4, dtype=np.float32))
    good = Segment("good", lambda _: ({}, {"x": x.get() + 1}), reads=(x,))
    backend.run(good)
    trace = backend.capture(good)
    assert backend.replay(trace).get()["x"].tolist() == [1, 2, 3, 4]
    backend.release(trace)
    backend.release(x)
