"""Where the time of our methods goes, and the least that the same matrix products cost.

`Stopwatch` times named functions from the outside: each gets a wrapper for the length of one call,
and a function's time leaves out that of the watched functions inside it. On a CPU every operation
has ended when its function returns, so nothing has to be synchronised and a wrapper costs about a
microsecond. Times with and without the wrappers stand side by side in the results.
"""

from __future__ import annotations

import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from gr.inference import Branches, RowFilter
from gr.model import Layout
from gr.tokenizer.trie import ItemTrie


class Stopwatch:
    """Seconds by path: names of the open sections, outermost first, joined by slashes."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._inner: list[float] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self._inner.append(0.0)
        path = "/".join(self._open)
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[path] += took - self._inner.pop()
            self._open.pop()
            if self._inner:
                self._inner[-1] += took

    @contextmanager
    def watching(self, *points: tuple[Any, str, str]) -> Iterator[None]:
        """Time the functions (owner, attribute, name) until the block ends."""
        with ExitStack() as stack:
            for owner, attribute, name in points:
                wrapped = self._wrapped(getattr(owner, attribute), name)
                stack.enter_context(patch.object(owner, attribute, wrapped))
            yield

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.section(name):
                return function(*args, **kwargs)

        return call

    def sum(self, *inside: str, leaf: str | None = None) -> float:
        """Seconds of the paths that hold all these names and, where it is given, end with one."""
        return sum(
            seconds
            for path, seconds in self.seconds.items()
            if set(inside) <= set(names := path.split("/")) and leaf in (None, names[-1])
        )

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def model_points(model: nn.Module) -> list[tuple[Any, str, str]]:
    """What is watched of a decoder, Llama's or ours, and of the steps that call it."""
    hstu = importlib.import_module("gr.model.blocks.hstu")
    return [
        (Branches, "append", "append"),
        (model, "forward", "decoder"),
        (Layout, "geometry", "masks"),
        (F, "linear", "products"),
        (F, "scaled_dot_product_attention", "attention"),
        (hstu, "hstu_attention", "attention"),
        (DynamicCache, "update", "cache"),
    ]


def retrieval_points() -> list[tuple[Any, str, str]]:
    """What is watched of a beam search outside the decoder."""
    # The package's function of the same name hides the module from an ordinary import.
    search = importlib.import_module("gr.inference.retrieve")
    return [
        (ItemTrie, "fan_out", "children"),
        (RowFilter, "count", "count"),
        (search, "_gains", "log-softmax"),
        (torch.Tensor, "topk", "top-k"),
    ]


def model_parts(watch: Stopwatch, phase: str) -> dict[str, float]:
    """Seconds of the decoder inside one section: parts that add up to all of it."""
    parts = {
        "linear layers": watch.sum(phase, leaf="products"),
        "attention": watch.sum(phase, leaf="attention"),
        "key/value cache": watch.sum(phase, leaf="cache"),
        # Outside the decoder a step does nothing but prepare its masks, positions and times.
        "masks and layout": watch.sum(phase, leaf="masks") + watch.sum(phase, leaf=phase),
        "norms, rotations, activations": watch.sum(phase, leaf="decoder"),
    }
    assert abs(sum(parts.values()) - watch.sum(phase)) < 1e-6, dict(watch.seconds)
    return parts


class BareProducts:
    """The matrix products of one step of a decoder, and nothing else.

    Every ``nn.Linear`` of the model (q, k, v, o, gate, up, down of each layer, and the head) as one
    ``torch.mm`` with its own weight, and per layer q kᵀ and weights v as two ``torch.bmm``. Inputs
    and outputs are there already. No embedding, norm, rotation, activation, residual, softmax,
    mask, cache or bias.

    Args:
        model: the decoder.
        rows: users.
        new: tokens of each user in the step.
        keys: tokens that attention looks at, the new ones among them.
        heads_on: tokens of each user that the head is applied to.
    """

    def __init__(self, model: Any, rows: int, new: int, keys: int, heads_on: int) -> None:
        config, head = model.config, model.get_output_embeddings()
        size = config.hidden_size // config.num_attention_heads
        batch = rows * config.num_attention_heads
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []
        shared: dict[tuple[int, ...], Tensor] = {}

        def tensor(*shape: int) -> Tensor:
            if shape not in shared:
                shared[shape] = torch.randn(shape)
            return shared[shape]

        for module in model.modules():
            if isinstance(module, nn.Linear):
                weight = module.weight.detach()
                tokens = rows * (heads_on if module is head else new)
                x, y = tensor(tokens, weight.shape[1]), torch.empty(tokens, weight.shape[0])
                self.products.append((x, weight.T, y))
        q, score = tensor(batch, new, size), torch.empty(batch, new, keys)
        for _ in range(config.num_hidden_layers):
            # Each layer its own keys and values: those of one would stay in the processor's cache.
            k, v = torch.randn(batch, keys, size), torch.randn(batch, keys, size)
            self.products.append((q, k.transpose(1, 2), score))
            self.products.append((tensor(batch, new, keys), v, torch.empty(batch, new, size)))

    def __call__(self) -> None:
        for a, b, out in self.products:
            if a.dim() == 2:
                torch.mm(a, b, out=out)
            else:
                torch.bmm(a, b, out=out)
