"""What a head reads of its target: the states of some layers, caught while the target runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..decoders import decoder_config
from ..vocabulary import UnsupportedError


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order.

    Raises:
        UnsupportedError: If there is no one list of them.
    """
    num_layers = decoder_config(target).num_hidden_layers
    name = "layers"
    found = [
        module
        for path, module in target.get_decoder().named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and path.rpartition(".")[2] in (name, "h")
    ]
    if len(found) != 1:
        raise UnsupportedError(
            f"`target` must keep its decoder layers in one list, but {type(target).__name__} has {len(found)} lists of "
            f"{num_layers}. EAGLE-3 heads cannot be used with it."
        )
    return found[0]


@contextmanager
def capture_features(target: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[Callable[[], torch.Tensor]]:
    """Within it every forward of the target leaves its states of some layers behind.

    Effects: the target has hooks meanwhile, which are gone afterwards whatever happens.

    Args:
        target: A decoder-only transformers model.
        layer_ids: As [`Eagle3Config.layer_ids`] counts them.

    Yields:
        Gives the states of the last forward, concatenated in the order of `layer_ids`, of shape
        `(batch_size, sequence_length, len(layer_ids) * hidden_size)`, on the device of the last of these layers.

    Raises:
        UnsupportedError: If the target's layers cannot be found.
    """
    layers, states = decoder_layers(target), dict[int, torch.Tensor]()

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def features() -> torch.Tensor:
        device = states[layer_ids[-1]].device
        return torch.cat([states[index].to(device) for index in layer_ids], dim=-1)

    with ExitStack() as stack:
        for index in sorted(set(layer_ids)):
            stack.callback(layers[index - 1].register_forward_hook(keep(index)).remove)
        yield features
