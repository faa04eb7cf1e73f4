"""What a head reads of its target: the states of some layers, caught while the target runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..decoders import decoder_config
from ..vocabulary import UnsupportedError
from .head import Eagle3Head

MAX_TOLD_BYTES = 2**28  # of a prompt: a message between processes can hold a few times as much

FeatureGetter = Callable[[tuple[int, ...]], torch.Tensor]


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order.

    Raises:
        UnsupportedError: If there is no one list of them.
    """
    num_layers = decoder_config(target).num_hidden_layers
    found = [
        module
        for path, module in target.get_decoder().named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and path.rpartition(".")[2] in ("layers", "h")
    ]
    if len(found) != 1:
        raise UnsupportedError(
            f"`target` must keep its decoder layers in one list, but {type(target).__name__} has {len(found)} lists of "
            f"{num_layers}. EAGLE-3 heads cannot be used with it."
        )
    return found[0]


def feature_layers(target: PreTrainedModel, assistant: PreTrainedModel | None) -> tuple[int, ...]:
    """Which states of the target an assistant reads: none, unless it is an EAGLE-3 head.

    Raises:
        UnsupportedError: If the target has no such state.
    """
    if not isinstance(assistant, Eagle3Head):
        return ()
    return tuple(assistant.config.layer_ids(decoder_config(target).num_hidden_layers))


def check_head(target: PreTrainedModel, head: Eagle3Head) -> None:
    """Refuses a head that was made for another target.

    Raises:
        UnsupportedError: If the target's states have another size, its layers cannot be found or are too few, or the
            head drafts tokens that it does not have.
    """
    decoder_layers(target)
    feature_layers(target, head)
    config = decoder_config(target)
    size = head.config.target_hidden_size or head.config.layer.hidden_size
    if config.hidden_size != size:
        raise UnsupportedError(
            f"`assistant_model` must be a head for a target of hidden size {config.hidden_size}, but it reads states "
            f"of size {size}. Choose the head that was made for this target."
        )
    # Without weights, as the doctor has it, nobody knows.
    last = -1 if head.d2t.is_meta else int(head.draft_tokens.max())
    if last >= config.vocab_size:
        raise UnsupportedError(
            f"`assistant_model` must draft tokens of the target's, which has {config.vocab_size}, but it drafts token "
            f"{last}. Choose the head that was made for this target."
        )


class TargetFeatures:
    """The states of some layers that the forwards of a target leave behind.

    Args:
        target: A decoder-only transformers model.
        layer_ids: As [`Eagle3Config.layer_ids`] counts them.

    Raises:
        UnsupportedError: If the target's layers cannot be found.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._layer_ids = list(layer_ids)
        layers = decoder_layers(target) if layer_ids else nn.ModuleList()
        self._layers = {index: layers[index - 1] for index in sorted(set(layer_ids))}
        self._states: dict[int, list[torch.Tensor]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within it the states of this thread's forwards are kept; those from before are dropped.

        Effects: the layers have hooks meanwhile, which are gone afterwards whatever happens.
        """
        self._states = {index: [] for index in self._layers}
        thread = threading.get_ident()

        def keep(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if threading.get_ident() == thread:  # other threads may run the same model meanwhile
                    self._states[index].append(output[0] if isinstance(output, tuple) else output)

            return hook

        with ExitStack() as stack:
            for index, layer in self._layers.items():
                stack.callback(layer.register_forward_hook(keep(index)).remove)
            yield

    def getter(self, row: int, slots: Sequence[int] | slice) -> FeatureGetter | None:
        """What gives `of_row` for a head's layers, which costs something; `None` where no layer is watched."""
        return functools.cache(lambda layer_ids: self.of_row(row, slots, layer_ids)) if self._layers else None

    def of_row(self, row: int, slots: Sequence[int] | slice, layer_ids: Sequence[int]) -> torch.Tensor:
        """Features of some tokens of one row.

        Args:
            row: Index of the row in the forwards.
            slots: Places of the tokens, among all that these read. Of a slice, which is all of a prompt, as many of the
                last ones as `MAX_TOLD_BYTES` hold: a head can begin anywhere.
            layer_ids: Those of the layers that are wanted, in order.

        Returns:
            A copy of shape `(num_tokens, feature_size)`, on the device of the last of the layers.

        Raises:
            LookupError: If a layer has left nothing. A model that is compiled may not look for hooks.
        """
        if not all(self._states.values()):
            raise LookupError("an EAGLE-3 head needs states of the target's layers, which have run without hooks")
        if isinstance(slots, slice):
            token_bytes = sum(self._states[index][0][0, 0].nbytes for index in layer_ids)
            slots = slice(max(slots.start, -max(MAX_TOLD_BYTES // token_bytes, 1)), None)
        parts = {
            index: torch.cat([state[row] for state in states])[slots] if len(states) > 1 else states[0][row, slots]
            for index, states in self._states.items()
            if index in layer_ids
        }
        return self._concatenate(parts, layer_ids)

    def of_last_forward(self) -> torch.Tensor:
        """Features of all tokens of the last forward, of shape `(batch_size, sequence_length, feature_size)`."""
        return self._concatenate({index: states[-1] for index, states in self._states.items()}, self._layer_ids)

    @staticmethod
    def _concatenate(parts: dict[int, torch.Tensor], layer_ids: Sequence[int]) -> torch.Tensor:
        device = parts[layer_ids[-1]].device
        return torch.cat([parts[index].to(device) for index in layer_ids], dim=-1)


class FeatureWatch:
    """The features of a target for whoever needs them at the moment.

    Args:
        target: The target.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        self._target = target
        self._known: dict[tuple[int, ...], TargetFeatures] = {}

    def of(self, layers: Collection[int]) -> TargetFeatures:
        """Those of some layers, or of none. The layers are looked for once."""
        layer_ids = tuple(sorted(layers))
        if layer_ids not in self._known:
            self._known[layer_ids] = TargetFeatures(self._target, layer_ids)
        return self._known[layer_ids]


@contextmanager
def capture_features(target: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[Callable[[], torch.Tensor]]:
    """Within it every forward of the target leaves its states of some layers behind, as in [`TargetFeatures`].

    Yields:
        What gives those of the last forward, of shape `(batch_size, sequence_length, len(layer_ids) * hidden_size)`.
    """
    features = TargetFeatures(target, layer_ids)
    with features.watch():
        yield features.of_last_forward
