"""What torch itself offers and a captured step on a backend over torch may not use (clause C2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from forebay.specs import Backend, CaptureViolation, Segment

FORBIDDEN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "zeros": (lambda x, _: x + torch.zeros(4), "creates an array"),
    "ones": (lambda x, _: x + torch.ones(4), "creates an array"),
    "full": (lambda x, _: x + torch.full((4,), 2.0), "creates an array"),
    "empty": (lambda x, _: torch.empty(4), "creates an array"),
    "arange": (lambda x, _: x + torch.arange(4), "creates an array"),
    "rand": (lambda x, _: x + torch.rand(4), "random numbers"),
    "rand_like": (lambda x, _: torch.rand_like(x), "random numbers"),
    "dropout": (lambda x, _: torch.nn.functional.dropout(x), "random numbers"),
    "tensor": (lambda x, _: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "made on the host"),
    "from_numpy": (lambda x, _: x + torch.from_numpy(np.ones(4, np.float32)), "made on the host"),
    "a closed-over tensor": (lambda x, closed: x + closed, "closed over"),
    "a closed-over tensor alone": (lambda x, closed: closed, "closed over"),
    "add_": (lambda x, _: x.add_(1), "in place"),
    "zero_": (lambda x, _: x.zero_(), "in place"),
    "copy_": (lambda x, _: x.copy_(x + 1), "in place"),
    "clamp_ of a temporary": (lambda x, _: (x + 1).clamp_(0, 1), "in place"),
    "out=": (lambda x, _: torch.add(x, 1, out=x), "in place"),
    "index_put_": (lambda x, _: x.index_put_((x > 1,), x[0]), "in place|mask"),
    "numpy()": (lambda x, _: x.numpy(), "host read"),
    "item()": (lambda x, _: x.sum().item(), "host read"),
    "data_ptr()": (lambda x, _: x.data_ptr(), "host read"),
    "equal": (lambda x, _: torch.equal(x, x), "host"),
    "nonzero": (lambda x, _: torch.nonzero(x), "host"),
    "masked_select": (lambda x, _: torch.masked_select(x, x > 1), "host"),
    "unique": (lambda x, _: torch.unique(x), "host"),
    "a mask": (lambda x, _: x[x > 1], "mask"),
    "tolist()": (lambda x, _: x.tolist(), "host read"),
    "tensor_split by a tensor": (lambda x, _: torch.tensor_split(x, x[:1].to(torch.int64))[0], "host read"),
}


@pytest.mark.clause("C2", "C12")
@pytest.mark.parametrize("name", FORBIDDEN)
def test_torch_cannot_reach_around_the_capture(backend: Backend, name: str) -> None:
    act, says = FORBIDDEN[name]
    x = backend.buffer("x", np.arange(4, dtype=np.float32))
    closed = backend.to_device(np.arange(4, dtype=np.float32))

    def fn(_: Backend) -> Any:
        made = act(x.get(), closed)
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
