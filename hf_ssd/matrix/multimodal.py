"""Tiny random vision-language models with an image for each, and text-only assistants that share their weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from .zoo import NOISE, SMALL, VOCAB_SIZE, finish, is_known

IMAGE, VISION_START, VISION_END = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3
SEED = 3

_TEXT: dict[str, Any] = {
    name: SMALL[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}


@dataclass(frozen=True)
class VisionFamily:
    """A vision-language architecture, tiny.

    Args:
        model_type: As in `AutoConfig.for_model`.
        text: Config values of its language model beside the common ones; `model_type` among them where its config
            wants that.
        vision: Config values of its vision tower.
        settings: Other config values.
        num_image_tokens: Places that an image takes in the prompt.
        grid: Patches of the image in height and width, for those that are told; others get a square image.
        remark: What is special about it, for readers.
        assistant_type: Model type of the assistant; that of the language model by default.
    """

    is_refused: ClassVar[bool] = False  # none of them has to be

    model_type: str
    remark: str = ""
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    num_image_tokens: int = 4
    grid: tuple[int, int] | None = None
    assistant_type: str | None = None
    kind: str = "vision-language"
    max_rows: int = 1
    drafts_for_itself: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has this family."""
        return is_known(self.model_type)

    def make(self, *, noise: float = 0.0, attn_implementation: str | None = None) -> PreTrainedModel:
        """A float32 model, the same each time. The global random state is left alone."""
        config = AutoConfig.for_model(
            self.model_type,
            text_config={**_TEXT, **self.text},
            vision_config={**(_VISION if self.grid is None else _QWEN_VISION), **self.vision},
            **self.settings,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation
            )
            return finish(model, noise)

    def make_assistant(self, *, noise: float = NOISE, attn_implementation: str | None = None) -> PreTrainedModel:
        """A text model with the weights of the language model, and noise: it does not see the image."""
        whole = self.make(noise=noise, attn_implementation=attn_implementation)
        text_config = whole.config.get_text_config(decoder=True)
        if self.assistant_type is not None:
            names = [name for name in (*_TEXT, "head_dim") if hasattr(text_config, name)]
            values = {name: getattr(text_config, name) for name in names}
            text_config = AutoConfig.for_model(self.assistant_type, **values)
        assistant = AutoModelForCausalLM.from_config(
            text_config, dtype=torch.float32, attn_implementation=attn_implementation
        ).eval()
        assistant.base_model.load_state_dict(whole.get_decoder().state_dict())
        assistant.get_output_embeddings().load_state_dict(whole.get_output_embeddings().state_dict())
        assistant.generation_config = whole.generation_config
        return assistant

    def prompts(self, num_rows: int) -> dict[str, torch.Tensor]:
        """A prompt with an image in it, as the family's processor would make it. There is only one."""
        generator = torch.Generator().manual_seed(SEED)
        words = torch.randint(1, VISION_END, (1, 12), generator=generator)
        image = torch.full((1, self.num_image_tokens), IMAGE)
        start, end = torch.tensor([[VISION_START]]), torch.tensor([[VISION_END]])
        input_ids = torch.cat([words[:, :4], start, image, end, words[:, 4:]], dim=1)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        types = (input_ids == IMAGE).long()
        if self.grid is not None:
            height, width = self.grid
            patch = 3 * 2 * _QWEN_VISION["patch_size"] ** 2
            inputs["pixel_values"] = torch.randn(height * width, patch, generator=generator)
            inputs["image_grid_thw"] = torch.tensor([[1, height, width]])
            inputs["mm_token_type_ids"] = types
            return inputs
        size = _VISION["image_size"]
        shape = (1, 1, 3, size, size) if self.model_type in ("idefics3", "smolvlm") else (1, 3, size, size)
        inputs["pixel_values"] = torch.randn(shape, generator=generator)
        if self.model_type in ("gemma3", "paligemma"):
            inputs["token_type_ids"] = types if self.model_type == "gemma3" else torch.zeros_like(types)
        return inputs


_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False}

VISION_FAMILIES = (
    VisionFamily(
        "llava",
        "square patches",
        text={"model_type": "llama"},
        vision={"model_type": "clip_vision_model", "projection_dim": 32},
        settings={"image_token_index": IMAGE, "vision_feature_layer": -1},
    ),
    VisionFamily(
        "qwen2_vl",
        "positions of three dimensions",
        text=_ROPE,
        vision={"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        settings={"image_token_id": IMAGE, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END},
        grid=(4, 4),
        assistant_type="qwen2",
    ),
    VisionFamily(
        "qwen2_5_vl",
        "positions of three dimensions",
        text=_ROPE,
        vision={"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "fullatt_block_indexes": [1]},
        settings={"image_token_id": IMAGE, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END},
        grid=(4, 4),
        assistant_type="qwen2",
    ),
    VisionFamily(
        "gemma3",
        "mixed windows, images attend both ways",
        text={**_GEMMA, "tie_word_embeddings": False, "layer_types": ["sliding_attention", "full_attention"]},
        vision=_SIGLIP,
        settings={
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": VISION_START,
            "tie_word_embeddings": False,
        },
    ),
    VisionFamily(
        "idefics3",
        "pixel shuffle",
        text={"model_type": "llama"},
        settings={"image_token_id": IMAGE, "scale_factor": 2},
        num_image_tokens=1,
    ),
    VisionFamily(
        "smolvlm",
        "pixel shuffle",
        text={"model_type": "llama"},
        settings={"image_token_id": IMAGE, "scale_factor": 2},
        num_image_tokens=1,
    ),
    VisionFamily(
        "paligemma",
        "the prompt attends both ways",
        text={"model_type": "gemma", "head_dim": 8},
        vision={**_SIGLIP, "projection_dim": 32},
        settings={"image_token_index": IMAGE, "projection_dim": 32},
        assistant_type="gemma",
    ),
)
