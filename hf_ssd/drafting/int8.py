"""An assistant with its linear layers in 8 bits.

A draft step on a CPU takes as long as reading the weights does, and 8 bits are half of bfloat16. The drafts differ a
little from what the assistant would draft otherwise; verification takes them for what they are, so the output does not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn
from torch.backends import mkldnn
from transformers import PreTrainedModel

MIN_AUTO_WEIGHTS = 5_000_000  # below, a step is not spent on reading weights
MIN_SPEED_UP = 1.1  # of a step, for what 8 bits cost in acceptance
MAX_SLOW_DOWN = 10.0  # of a small layer, whose weights are in the processor's cache anyway
TRIAL_TOKENS = 4
LEVELS, ZERO_POINT = 127, 128  # inputs are unsigned bytes around the zero point: what processors multiply fastest


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights, one scale per output, and 8-bit inputs, one scale per token.

    Args:
        linear: The layer to stand in for. Its weights are not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        self._scales = (weight.abs().amax(dim=1) / LEVELS).clamp(min=1e-12)
        rows = (weight / self._scales[:, None]).round().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rows, None)
        self._zero_points = torch.zeros(self.out_features, dtype=torch.long, device="cpu")
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`: from `(..., in_features)` to `(..., out_features)`, in the dtype of the inputs."""
        rows = inputs.float().reshape(-1, self.in_features)
        # Per token: a single outlier among them must not blur all others.
        scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
        bytes_ = (rows * (LEVELS / scales)).round_().add_(ZERO_POINT).to(torch.uint8)
        outputs = torch.ops.onednn.qlinear_pointwise(
            bytes_,
            1.0 / LEVELS,
            ZERO_POINT,
            self._packed,
            self._scales,
            self._zero_points,
            None,  # the bias comes after the tokens' scales
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        ).mul_(scales)
        if self._bias is not None:
            outputs += self._bias
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)


def is_supported() -> bool:
    """Whether this build of torch has the kernels."""
    return mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")


def may_pay(model: nn.Module) -> bool:
    """Whether 8 bits are worth a try: a large enough model on the CPU, on a processor that has the instructions.

    Without them the kernels are a thousand times slower, which one layer tells.
    """
    linears = [module for module in model.modules() if is_plain(module)]
    if not linears or not is_supported() or any(module.weight.device.type != "cpu" for module in linears):
        return False
    if sum(module.weight.numel() for module in linears) < MIN_AUTO_WEIGHTS:
        return False
    layer = min(linears, key=lambda module: module.weight.numel())
    inputs = torch.ones(TRIAL_TOKENS, layer.in_features, dtype=layer.weight.dtype, device="cpu")
    with torch.inference_mode():
        int8 = Int8Linear(layer)
        return best_time(lambda: int8(inputs)) < MAX_SLOW_DOWN * best_time(lambda: layer(inputs))


def is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module is a product with a matrix of numbers: a subclass may do more, and weights may be quantised."""
    return type(module) is nn.Linear and type(module.weight) in (torch.Tensor, nn.Parameter)


def best_time(action: Callable[[], object], repeats: int = 4) -> float:
    """The shortest time in seconds that `action` takes, of some repeats."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def copy_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Other modules over the same tensors, to be changed without changing `model`."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def quantize_linears(model: nn.Module) -> None:
    """Replaces every linear layer of `model` on the CPU.

    Effects: `model` is changed in place; layers that other models share with it are not.

    Raises:
        ValueError: If this build of torch has no kernels for it.
    """
    if not is_supported():
        raise ValueError(
            '`assistant_quantization` must be None or "auto" here, but got "int8": this build of torch has no oneDNN.'
        )
    replaced: dict[int, Int8Linear] = {}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # `named_children` names a shared layer only once
            if is_plain(child) and child.weight.device.type == "cpu":
                if id(child) not in replaced:
                    replaced[id(child)] = Int8Linear(child)
                module._modules[name] = replaced[id(child)]
