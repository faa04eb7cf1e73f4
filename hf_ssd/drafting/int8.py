"""An assistant with its linear layers in 8 bits.

A draft step on a CPU takes as long as reading the weights does, and 8 bits are half of bfloat16. The drafts differ a
little from what the assistant would draft otherwise; verification takes them for what they are, so the output does not.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.backends import quantized

MIN_AUTO_WEIGHTS = 5_000_000  # below, a step is not spent on reading weights
ENGINE = "onednn"


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights, one scale per output, and 8-bit inputs, one scale per token.

    Args:
        linear: The layer to stand in for. Its weights are not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).double()
        rows = torch.quantize_per_channel(weight, scales, torch.zeros_like(scales, dtype=torch.long), 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(rows, None)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`: from `(..., in_features)` to `(..., out_features)`, in the dtype of the inputs."""
        rows = inputs.float().reshape(-1, self.in_features)
        # The kernel has one scale for all tokens, and a single outlier among them would blur all others.
        scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
        outputs = torch.ops.quantized.linear_dynamic(rows / scales, self._packed, False) * scales
        if self._bias is not None:
            outputs += self._bias
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)


def is_supported() -> bool:
    """Whether this build of torch has the kernels."""
    return ENGINE in quantized.supported_engines


def pays(model: nn.Module) -> bool:
    """Whether 8 bits make a draft step faster: a model on the CPU that is large enough."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    is_on_cpu = all(module.weight.device.type == "cpu" for module in linears)
    return is_supported() and is_on_cpu and sum(module.weight.numel() for module in linears) >= MIN_AUTO_WEIGHTS


def quantize_linears(model: nn.Module) -> None:
    """Replaces every linear layer of `model` on the CPU.

    Effects: `model` is changed in place; layers that other models share with it are not.

    Raises:
        ValueError: If this build of torch has no kernels for it.
    """
    if not is_supported():
        raise ValueError(
            f'`assistant_quantization` must be None or "auto" here, but got "int8": this build of torch has no '
            f"{ENGINE} engine."
        )
    quantized.engine = ENGINE
    replaced: dict[int, Int8Linear] = {}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # `named_children` names a shared layer only once
            # Exact type: what a subclass does beyond a product is not known here.
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                if id(child) not in replaced:
                    replaced[id(child)] = Int8Linear(child)
                module._modules[name] = replaced[id(child)]
