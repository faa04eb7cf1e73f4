"""Tiny random models of transformers' own architectures, which generate within milliseconds on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

VOCAB_SIZE = 64

# What makes a model small, under all the names that config classes have for it; each takes those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "max_position_embeddings": 256,
    # Large weights: with the usual 0.02 every model repeats one token for ever.
    "initializer_range": 0.35,
    "init_std": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "sliding_window": 8,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    # Gemma 3n
    "laurel_rank": 8,
}

NOISE = 0.06  # relative to the spread of the weights: drafts are right in about two of three cases
SPREAD = 0.1  # of parameters of one dimension, around their initial values


PROMPT_LENGTHS = (12, 9, 5)  # of the rows of a batch; all longer or shorter than the windows of 8
SEED = 7


class Tried(Protocol):
    """Tiny models of one architecture, as the trials need them.

    Attributes:
        model_type: As in `AutoConfig.for_model`.
        remark: What is special about it.
        kind: `"decoder-only"`, `"encoder-decoder"` or `"vision-language"`.
        max_rows: Most rows that a call may have.
        drafts_for_itself: Whether a copy of the target, as its assistant, knows all that the target does.
    """

    @property
    def model_type(self) -> str: ...
    @property
    def remark(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def drafts_for_itself(self) -> bool: ...
    @property
    def is_known(self) -> bool: ...

    def make(self, *, attn_implementation: str | None = None) -> PreTrainedModel:
        """The target."""
        ...

    def make_assistant(self, *, attn_implementation: str | None = None) -> PreTrainedModel:
        """One that is partly right."""
        ...

    def prompts(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Arguments of `generate()`."""
        ...


@dataclass(frozen=True)
class Family:
    """One architecture of transformers, tiny.

    Args:
        model_type: As in `AutoConfig.for_model`.
        remark: What is special about it, for readers.
        settings: Config values beside those of `SMALL`, or instead of them.
        is_refused: Whether SSD has to refuse it: it is recurrent, or partly so, or keeps no cache.
        noise: What `make_assistant` adds.
    """

    model_type: str
    remark: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    is_refused: bool = False
    noise: float = NOISE
    kind: str = "decoder-only"
    max_rows: int = 3
    drafts_for_itself: bool = True

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has this family."""
        return is_known(self.model_type)

    @property
    def config_values(self) -> dict[str, Any]:
        """The values that its config class is made with."""
        config_class = CONFIG_MAPPING[self.model_type]
        known = {*config_class().to_dict(), *config_class.attribute_map}
        values = {key: value for key, value in SMALL.items() if key in known}
        return {**values, **self.settings}

    def make(self, *, noise: float = 0.0, **settings: Any) -> PreTrainedModel:
        """A float32 model, the same each time. The global random state is left alone.

        Args:
            noise: How far its weights are from the family's, relative to their spread.
            **settings: Other config values.

        Raises:
            ValueError: If transformers has no such family, or not under the attention that is asked for.
        """
        config = AutoConfig.for_model(self.model_type, **{**self.config_values, **settings})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return finish(AutoModelForCausalLM.from_config(config, dtype=torch.float32), noise)

    def make_assistant(self, **settings: Any) -> PreTrainedModel:
        """A model that is near the family's: as its assistant it is partly right."""
        return self.make(noise=self.noise, **settings)

    def prompts(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Left-padded prompts, the same each time."""
        return text_prompts(num_rows)


def text_prompts(num_rows: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts, the same each time."""
    generator = torch.Generator().manual_seed(SEED)
    longest = PROMPT_LENGTHS[0]
    input_ids = torch.randint(1, VOCAB_SIZE, (num_rows, longest), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in zip(range(num_rows), PROMPT_LENGTHS, strict=False):
        input_ids[row, : longest - length] = 0
        attention_mask[row, : longest - length] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def is_known(model_type: str) -> bool:
    """Whether the installed transformers has a family."""
    return model_type in CONFIG_MAPPING


def finish(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A new random model made ready: no parameters that are all alike, and as much noise as asked for.

    Effects: changes the model, and draws from torch's generator.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:  # biases, norms, sinks: without it all 0 or 1, and what goes wrong unseen
                parameter.add_(torch.randn_like(parameter) * SPREAD)
            elif noise:
                parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()
