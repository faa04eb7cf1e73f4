"""The student: the target's first layers, or a narrower cut of them, which training turns into an assistant."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Modules of a layer that write to the residual stream, as families call them.
OUTPUT_PROJECTIONS = {"o_proj", "down_proj", "c_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "fc_out"}
DEFAULT_SHARE = 5  # an assistant of a fifth of the layers: 6 of 30, 7 of 36


def make_student(target: PreTrainedModel, *, layers: int | None = None, width: int | None = None) -> PreTrainedModel:
    """A smaller model of the target's class, in float32, that starts from the target's weights.

    Its layers are the target's first ones: on a target of 30 layers they agreed with it on 6 % of the tokens before any
    training, the first and the last ones together on none. As wide as the target it shares embedding and output
    projection, which stay as they are. Narrower, it gets a cut of all weights ([`Cut`]) and trains them all.

    Args:
        target: A decoder-only transformers model, which is left as it is.
        layers: Number of decoder layers; `None` is a fifth of the target's.
        width: Hidden size; `None` is the target's.

    Raises:
        ValueError: If the target has fewer layers, or cannot be made that narrow.
    """
    config = student_config(target.config, layers=layers, width=width)
    student: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = target.state_dict()
    is_narrow = config.hidden_size != target.config.hidden_size
    cut = Cut(target, config) if is_narrow else None
    start = {}
    for name, own in student.state_dict().items():
        taken = weights[name] if cut is None else cut(name, weights[name])
        if taken.shape != own.shape:
            raise ValueError(
                f"`width` must keep the form of the target's layers, but at {config.hidden_size} {name} would be of "
                f"shape {tuple(own.shape)} and not {tuple(taken.shape)}. Choose another width, or `layers` alone."
            )
        start[name] = taken.detach().to("cpu", torch.float32)
    student.load_state_dict(start)
    student.generation_config = copy.deepcopy(target.generation_config)
    if not is_narrow:
        freeze_shared(student)
    return student


def load_student(folder: str, target: PreTrainedModel, layers: int | None = None) -> PreTrainedModel:
    """An assistant to go on from, in float32.

    Where its embedding and output projection are the target's, they stay that.

    Args:
        folder: Where it is.
        target: Whose assistant it is.
        layers: How many it shall have; see [`deepen`].

    Raises:
        OSError: If there is none.
        ValueError: If its vocabulary is not the target's, or it cannot get so many layers.
    """
    student: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    if student.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"`init_from` must hold an assistant of the target's {target.config.vocab_size} tokens, but {folder!r} "
            f"knows {student.config.vocab_size}."
        )
    if layers is not None and layers != student.config.num_hidden_layers:
        student = deepen(student, target, layers)
    shares = (
        torch.equal(own.weight.to(their.weight), their.weight)
        for own, their in (
            (student.get_input_embeddings(), target.get_input_embeddings()),
            (student.get_output_embeddings(), target.get_output_embeddings()),
        )
        if own.weight.shape == their.weight.shape
    )
    if list(shares) == [True, True]:
        freeze_shared(student)
    return student


def deepen(student: PreTrainedModel, target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """An assistant with more layers that says the same, for training to make something of them.

    They are those of the target that come next, but for what they write to the residual stream, which is nothing.

    Args:
        student: An assistant as wide as the target.
        target: A deeper model of its class.
        layers: Number of layers of the result.

    Raises:
        ValueError: If that is not more than the assistant has, or it is not made of the target's kind of layers.
    """
    own = student.config.num_hidden_layers
    if layers < own:
        raise ValueError(f"`layers` must be at least {own}, which the assistant of `init_from` has, but got {layers}.")
    deeper = make_student(target, layers=layers)
    weights, given = deeper.state_dict(), student.state_dict()
    if any(name not in weights or weights[name].shape != weight.shape for name, weight in given.items()):
        raise ValueError(
            "`layers` must be left out for an assistant that is not made of layers like the target's and as wide, but "
            f"got {layers}."
        )
    for name in weights.keys() - given.keys():
        if OUTPUT_PROJECTIONS & set(name.split(".")):
            weights[name].zero_()
    deeper.load_state_dict(given, strict=False)
    probe = torch.arange(8)[None] % student.config.vocab_size
    with torch.no_grad():
        said, says = (model.eval()(probe, use_cache=False).logits for model in (student, deeper))
    if not torch.allclose(said, says, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"`layers` must be left out with `init_from` for a model of type {target.config.model_type!r}, whose "
            f"layers cannot be added without effect, but got {layers}."
        )
    deeper.generation_config = student.generation_config
    return deeper.requires_grad_(True)


def freeze_shared(student: PreTrainedModel) -> None:
    """Keeps embedding and output projection as they are."""
    for module in (student.get_input_embeddings(), student.get_output_embeddings()):
        module.requires_grad_(False)


def student_config(config: PretrainedConfig, *, layers: int | None, width: int | None) -> PretrainedConfig:
    """The target's configuration with fewer layers, and narrower ones.

    Raises:
        ValueError: If that is not smaller, or heads do not fit in.
    """
    num_layers, hidden_size = config.num_hidden_layers, config.hidden_size
    layers = max(1, num_layers // DEFAULT_SHARE) if layers is None else layers
    if not 1 <= layers <= num_layers:
        raise ValueError(f"`layers` must be between 1 and {num_layers}, the target's own, but got {layers}.")
    smaller = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        # One entry per layer: windows, kinds of layers.
        if isinstance(value, (list, tuple)) and len(value) == num_layers and layers != num_layers:
            setattr(smaller, name, value[:layers])
    smaller.num_hidden_layers = layers
    if width is None or width == hidden_size:
        return smaller
    if width > hidden_size:
        raise ValueError(f"`width` must be at most {hidden_size}, the target's own, but got {width}.")
    if not hasattr(config, "intermediate_size"):
        raise ValueError(f"`width` must be left out for a target of type {config.model_type!r}. Use `layers` alone.")
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    group, head_dim = heads // key_heads, getattr(config, "head_dim", None) or hidden_size // heads
    # As many heads as keep their share of the width, whole groups of them.
    kept = max(1, round(key_heads * width / hidden_size))
    values: dict[str, Any] = {
        "hidden_size": width,
        "head_dim": head_dim,
        "num_attention_heads": kept * group,
        "num_key_value_heads": kept,
        "intermediate_size": max(1, round(config.intermediate_size * width / hidden_size)),
    }
    for name, value in values.items():
        setattr(smaller, name, value)
    return smaller


class Cut:
    """A narrower model's weights out of a wider one's (weight subcloning, arXiv 2312.09299).

    The dimensions of the residual stream that matter most are kept, the same ones everywhere; of the inner dimensions
    of each layer, heads and neurons, the first ones. What is kept of a layer thus still fits together.

    Args:
        target: The wider model, with layers named as Llama's.
        config: The narrower model's configuration.
    """

    # Which side of a weight is the residual stream; the other is heads or neurons.
    READS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    WRITES = ("o_proj", "down_proj")

    def __init__(self, target: PreTrainedModel, config: PretrainedConfig) -> None:
        # The energy of each dimension: all that is ever written to it.
        energy = target.get_input_embeddings().weight.detach().float().square().sum(dim=0)
        for name, weight in target.named_parameters():
            if name.split(".")[-2] in self.WRITES and weight.dim() == 2:
                energy = energy + weight.detach().float().square().sum(dim=1).to(energy.device)
        self._kept = energy.topk(config.hidden_size).indices.sort().values
        self._width = target.config.hidden_size
        # A norm divides by the mean over all dimensions; of those that are kept the mean is another.
        self._norm_scale = float((energy[self._kept].sum() / energy.sum() * self._width / config.hidden_size).sqrt())
        head_dim = config.head_dim
        inner = {"q_proj": config.num_attention_heads * head_dim, "o_proj": config.num_attention_heads * head_dim}
        inner |= dict.fromkeys(("k_proj", "v_proj"), config.num_key_value_heads * head_dim)
        self._inner = inner | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.intermediate_size)

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The part of a weight that is kept."""
        module = name.split(".")[-2]
        inner, kept = self._inner.get(module), self._kept.to(weight.device)
        if weight.dim() == 1:
            is_residual = module not in self.READS and weight.shape[0] == self._width
            scale = self._norm_scale if "norm" in module else 1.0
            return weight[kept] * scale if is_residual else weight[:inner]
        if module in self.READS:
            return weight[:inner, kept]
        if module in self.WRITES:
            return weight[kept, :inner]
        return weight  # of an unknown kind: its shape is checked by the caller


def save_student(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """Writes the assistant as a folder that `from_pretrained` loads.

    Only the weights are rounded: `student.to(dtype)` would round the rotary frequencies too.
    """
    weights = {
        name: weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype)
        for name, weight in student.state_dict().items()
    }
    student.save_pretrained(folder, state_dict=weights)
    config = copy.deepcopy(student.config)  # what was saved names the precision of training
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def count_own_parameters(student: nn.Module) -> int:
    """Parameters that training may change."""
    return sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
