"""A language model whose distributions are known exactly: logits are a table row, chosen by the last token.

In a module of its own, so that the assistant's process can import it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from hf_ssd.compat import CACHE_KEY

VOCAB_SIZE = 8


class LookupConfig(PreTrainedConfig):
    model_type = "lookup"

    def __init__(self, vocab_size: int = VOCAB_SIZE, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = vocab_size
        self.num_hidden_layers = 1


class LookupPreTrainedModel(PreTrainedModel):
    config_class = LookupConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        pass


class LookupModel(LookupPreTrainedModel):
    """Its hidden state is the one-hot vector of the token; its cache entries say which token they are of."""

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.eye(config.vocab_size), freeze=True)

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, return_dict=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        cache = kwargs.get(CACHE_KEY)
        if cache is None and use_cache:
            cache = DynamicCache()
        if cache is not None:
            entries = input_ids[:, None, :, None].to(hidden.dtype)
            cache.update(entries, entries, 0)
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE_KEY: cache})


class LookupForCausalLM(LookupPreTrainedModel, GenerationMixin):
    """P(next | last) = softmax(table[last]). A real cache goes along, so that lengths and roll-backs are real."""

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.model = LookupModel(config)
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def of(cls, table: torch.Tensor) -> LookupForCausalLM:
        """The model of a table of logits, of shape `(vocab_size, vocab_size)`: a row per last token."""
        model = cls(LookupConfig(vocab_size=len(table))).eval()
        with torch.no_grad():
            model.lm_head.weight.copy_(table.T)
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        use_cache=None,
        logits_to_keep=0,
        return_dict=None,
        **kwargs,
    ):
        outputs = self.model(input_ids, attention_mask, position_ids, use_cache, **kwargs)
        kept = outputs.last_hidden_state[:, -logits_to_keep:] if logits_to_keep else outputs.last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(kept), **{CACHE_KEY: outputs[CACHE_KEY]})
