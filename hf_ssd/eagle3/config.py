"""The configuration of an EAGLE-3 head, in the form that vllm-project's `speculators` keeps it in."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..vocabulary import UnsupportedError

ARCHITECTURE = "Eagle3Speculator"
LAYER_TYPES = ("llama", "qwen3")  # model types whose decoder layer published heads have
NUM_FEATURES = 3


def default_layer_ids(num_layers: int) -> list[int]:
    """Which states of a target of `num_layers` layers a head reads where its configuration names none.

    State 0 is the embedding's, state i what layer i - 1 gives, as in `hidden_states` of transformers' outputs.

    ```python
    >>> default_layer_ids(32), default_layer_ids(2)
    ([2, 16, 29], [2, 1, 1])

    ```
    """
    return [min(2, num_layers), max(1, num_layers // 2), max(1, num_layers - 3)]


class Eagle3Config(PreTrainedConfig):
    """Configuration of an [`Eagle3Head`].

    Args:
        transformer_layer_config: Configuration of the decoder layer, a Llama's or Qwen3's of one layer. Its
            `vocab_size` is the target's.
        draft_vocab_size: How many tokens the head may draft.
        norm_before_residual: Whether the layer's residual begins after the norm of the hidden state.
        norm_before_fc: Whether the concatenated features go through one norm before they are fused.
        fc_norm: Whether each feature goes through a norm of its own before.
        norm_output: Whether the hidden state that is fed back has gone through the final norm.
        target_hidden_size: The target's, where it is not the head's own.
        eagle_aux_hidden_state_layer_ids: Which of the target's states are read, as [`default_layer_ids`] counts them;
            `None` is the default for the target's number of layers.
        speculators_config: What `speculators` notes about the target and how many tokens to draft.

    Raises:
        UnsupportedError: If the decoder layer is of a kind that is not known here.
    """

    model_type = "eagle3"
    sub_configs = {"transformer_layer_config": AutoConfig}  # noqa: RUF012

    transformer_layer_config: Any = None
    draft_vocab_size: int = 32000
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    speculators_config: dict[str, Any] | None = None
    speculators_model_type: str = "eagle3"
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        layer = self.transformer_layer_config
        if not isinstance(layer, PreTrainedConfig):
            self.transformer_layer_config = AutoConfig.for_model(**{"model_type": "llama", **(layer or _ONE_LAYER)})
        self._check()
        super().__post_init__(**kwargs)

    @property
    def layer(self) -> PreTrainedConfig:
        """Configuration of the decoder layer, `_attn_implementation` included."""
        config: PreTrainedConfig = self.transformer_layer_config
        return config

    @property
    def num_features(self) -> int:
        """How many of the target's states are fused."""
        return len(self.eagle_aux_hidden_state_layer_ids or range(NUM_FEATURES))

    @property
    def feature_size(self) -> int:
        """Length of the features of a token, concatenated."""
        return self.num_features * (self.target_hidden_size or self.layer.hidden_size)

    def layer_ids(self, num_layers: int) -> list[int]:
        """Which states of a target of `num_layers` layers are read.

        Raises:
            UnsupportedError: If the target has no such state.
        """
        ids = self.eagle_aux_hidden_state_layer_ids or default_layer_ids(num_layers)
        if not all(1 <= index <= num_layers for index in ids):
            raise UnsupportedError(
                f"`eagle_aux_hidden_state_layer_ids` must be between 1 and {num_layers}, the target's number of "
                f"layers, but got {ids}. The head belongs to another target."
            )
        return list(ids)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The configuration that the layer holds."""
        return self.layer

    def to_dict(self) -> dict[str, Any]:
        """As `speculators` writes it, which names no `model_type` and a class of its own."""
        values = {name: value for name, value in super().to_dict().items() if name != "model_type"}
        return {**values, "architectures": [ARCHITECTURE]}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: programs that read it do not agree on what holds where a field is missing."""
        return {**super().to_diff_dict(), **{name: getattr(self, name) for name in _ALWAYS_WRITTEN}}

    def _check(self) -> None:
        layer = self.layer
        if layer.model_type not in LAYER_TYPES:
            raise UnsupportedError(
                f"`transformer_layer_config` must be of type {' or '.join(map(repr, LAYER_TYPES))}, but got "
                f"{layer.model_type!r}. Heads with other layers cannot be read."
            )
        if layer.num_hidden_layers != 1:
            raise UnsupportedError(
                f"`transformer_layer_config` must have one layer, but got num_hidden_layers={layer.num_hidden_layers}. "
                "Heads with more cannot be read."
            )
        if "sliding_attention" in (getattr(layer, "layer_types", None) or ()):
            raise UnsupportedError(
                "`transformer_layer_config` must have full attention, but got a sliding window. Such heads cannot be "
                "read."
            )
        if not 1 <= self.draft_vocab_size <= layer.vocab_size:
            raise UnsupportedError(
                f"`draft_vocab_size` must be between 1 and {layer.vocab_size}, the target's vocabulary, but got "
                f"{self.draft_vocab_size}."
            )


_ONE_LAYER = {"num_hidden_layers": 1}
_ALWAYS_WRITTEN = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "speculators_model_type",
    "target_hidden_size",
)
