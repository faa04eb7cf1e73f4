"""The head: one decoder layer over a token's embedding and the target's features of the token before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.utils import ModelOutput

from ..compat import CACHE_KEY
from ..vocabulary import UnsupportedError
from .config import Eagle3Config


@dataclass
class Eagle3Output(ModelOutput):
    """What a head says about tokens.

    Args:
        hidden_states: Its own states, of shape `(batch_size, sequence_length, hidden_size)`. In a draft they take the
            place of the fused features that the target has not given yet.
        logits: Over the draft vocabulary, of shape `(batch_size, sequence_length, draft_vocab_size)`, or
            `(num_positions, draft_vocab_size)` where only those of some positions were wanted.
    """

    hidden_states: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None


class Eagle3Layer(nn.Module):
    r"""A decoder layer whose attention reads \\([\mathrm{norm}(e), \mathrm{norm}(h)]\\), twice the hidden size.

    Args:
        config: Of the head.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        attention, mlp, norm = _PARTS[layer.model_type]
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = attention(layer, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * own.in_features, own.out_features, bias=own.bias is not None))
        self.mlp = mlp(layer)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            norm(layer.hidden_size, eps=layer.rms_norm_eps) for _ in range(3)
        )

    def forward(self, embeddings: torch.Tensor, hidden_states: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Hidden states after the layer, of the shape of both inputs; the other arguments are the attention's."""
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden_states = residual + self.self_attn(hidden_states=inputs, **attention)[0]
        output: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class Eagle3Head(PreTrainedModel):
    """An EAGLE-3 head (arXiv 2503.01840).

    It predicts a target's next tokens from what the target thought before: the states of a low, a middle and a high
    layer at token `i` and the token `i + 1` that followed give token `i + 2`. Where the target has not been asked yet,
    the head's own state at token `i` stands in for these features.

    Parameters are named as in checkpoints of vllm-project's `speculators`.

    Args:
        config: [`Eagle3Config`].

    Attributes:
        d2t: What to add to a token of the draft vocabulary to get the target's token, of shape `(draft_vocab_size,)`.
        t2d: Whether a token of the target's is in the draft vocabulary, of shape `(vocab_size,)`.
    """

    config: Eagle3Config
    config_class = Eagle3Config
    base_model_prefix = ""
    _no_split_modules = ["Eagle3Layer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        layer = config.layer
        layer._attn_implementation = config._attn_implementation  # as a model of its own would have it
        norm = _PARTS[layer.model_type][2]
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        if config.norm_before_fc:
            self.input_norm = norm(config.feature_size, eps=layer.rms_norm_eps)
        if config.fc_norm:
            size = config.feature_size // config.num_features
            self.fc_norm = nn.ModuleList(norm(size, eps=layer.rms_norm_eps) for _ in range(config.num_features))
        self.fc = nn.Linear(config.feature_size, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.rotary_emb = _ROTARY[layer.model_type](config=layer)
        self.norm = norm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(layer.vocab_size, dtype=torch.bool))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_logits: bool = True,
        *,
        features: torch.Tensor | None = None,
        logits_at: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Eagle3Output:
        """Runs the head on tokens.

        Args:
            input_ids: The target's token ids, of shape `(batch_size, sequence_length)`.
            hidden_states: For each token the fused features of the token before it, or the head's own state there, of
                shape `(batch_size, sequence_length, hidden_size)`.
            position_ids: Of shape `(batch_size, sequence_length)`; by default they follow the cache.
            attention_mask: Of shape `(batch_size, num_slots)`, or additive of shape
                `(batch_size, 1, sequence_length, num_slots)`; by default tokens see all that is before them.
            return_logits: Whether to project.
            features: The target's features, to be fused here, instead of `hidden_states`.
            logits_at: Which positions to project, if not all: bool, of shape `(batch_size, sequence_length)`.
            **kwargs: The cache under the name that this version of transformers has for it, extended in place.

        Returns:
            [`Eagle3Output`]: For each token, the prediction of the one after it.

        Raises:
            ValueError: If there is not one of `hidden_states` and `features`.
        """
        if (hidden_states is None) == (features is None):
            raise ValueError("Either `hidden_states` or `features` must be given, but got both or none.")
        if features is not None:
            hidden_states = self.fuse(features)
        cache: Cache | None = kwargs.pop(CACHE_KEY, None)
        if position_ids is None:
            num_cached = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(num_cached, num_cached + input_ids.shape[1], device=input_ids.device)[None]
        embeddings = self.embed_tokens(input_ids)
        mask = create_causal_mask(
            config=self.config.layer,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE_KEY: cache},
        )
        hidden_states = self.layer(
            embeddings,
            hidden_states,
            attention_mask=mask,
            position_embeddings=self.rotary_emb(embeddings, position_ids=position_ids),
            **{CACHE_KEY: cache},
            **kwargs,
        )
        if self.config.norm_output:
            hidden_states = self.norm(hidden_states)
        wanted = hidden_states if logits_at is None else hidden_states[logits_at]
        return Eagle3Output(hidden_states, self.project(wanted) if return_logits else None)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuses a target's features.

        Args:
            features: Of shape `(..., feature_size)`, the states in the order of the configuration's layers.

        Returns:
            Tensor of shape `(..., hidden_size)`.
        """
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_features, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, of shape `(..., draft_vocab_size)`, from the head's own states."""
        logits: torch.Tensor = self.lm_head(hidden_states if self.config.norm_output else self.norm(hidden_states))
        return logits

    @property
    def layer(self) -> Eagle3Layer:
        """The one decoder layer."""
        return cast(Eagle3Layer, self.layers[0])

    @property
    def draft_tokens(self) -> torch.Tensor:
        """The target's id of each token of the draft vocabulary, of shape `(draft_vocab_size,)`."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary: `-inf` for tokens that are not drafted.

        Args:
            logits: Of shape `(..., draft_vocab_size)`.
        """
        full = logits.new_full((*logits.shape[:-1], len(self.t2d)), float("-inf"))
        full[..., self.draft_tokens] = logits
        return full

    def set_draft_tokens(self, tokens: torch.Tensor) -> None:
        """Says which tokens the draft vocabulary holds.

        Effects: `d2t` and `t2d` are filled.

        Args:
            tokens: The target's ids, each once, of shape `(draft_vocab_size,)`.

        Raises:
            ValueError: If they are not that.
        """
        tokens = tokens.to(self.d2t.device, torch.long)
        num_known = int(((tokens >= 0) & (tokens < len(self.t2d))).sum())
        if not len(tokens) == num_known == len(tokens.unique()) == len(self.d2t):
            raise ValueError(
                f"`tokens` must be {len(self.d2t)} different ids below {len(self.t2d)}, but got {len(tokens)}, of "
                f"which {len(tokens.unique())} are different and {num_known} within bounds."
            )
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    def share_embedding(self, target: PreTrainedModel) -> None:
        """Takes the target's token embedding for the head's own, without a copy where precision and device allow it.

        One that accelerate offloads is fetched, and stays with the head.

        Effects: the embedding is frozen, and left out when the head is saved.

        Args:
            target: The model that the head drafts for.

        Raises:
            UnsupportedError: If it is of another size, or its weights are not there to be taken.
        """
        from accelerate.utils import align_module_device  # imports much

        embedding = target.get_input_embeddings()
        with align_module_device(embedding):  # fetches what is offloaded
            weight = embedding.weight.detach()
        if weight.is_meta:
            raise UnsupportedError(
                f"`target` must have its token embedding in memory, but that of {type(target).__name__} is on 'meta'. "
                "Load the target with a `device_map` that puts the embedding on a device."
            )
        if weight.shape != self.embed_tokens.weight.shape:
            raise UnsupportedError(
                f"`target` must have a token embedding of shape {tuple(self.embed_tokens.weight.shape)} for this head, "
                f"but got {tuple(weight.shape)}. Choose the target that the head was made for."
            )
        own = self.fc.weight
        self.embed_tokens = nn.Embedding.from_pretrained(weight.to(own.device, own.dtype), freeze=True)
        self._keys_to_ignore_on_save = {"embed_tokens.weight"}

    def new_cache(self) -> DynamicCache:
        """An empty cache for the one layer."""
        return DynamicCache(config=self.config.layer)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:  # the lowest ids, where a checkpoint names none
            init.zeros_(self.d2t)
            init.copy_(self.t2d, torch.arange(len(self.t2d)) < len(self.d2t))


_PARTS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaAttention, modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm),
    "qwen3": (modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3MLP, modeling_qwen3.Qwen3RMSNorm),
}
_ROTARY: dict[str, Any] = {
    "llama": modeling_llama.LlamaRotaryEmbedding,
    "qwen3": modeling_qwen3.Qwen3RotaryEmbedding,
}
