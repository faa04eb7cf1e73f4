"""The families: each of transformers' decoder-only architectures that comes without an image or sound tower."""

from __future__ import annotations

from typing import Any

from .zoo import Family

_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA: dict[str, Any] = {**_MIXED, "query_pre_attn_scalar": 8}
# Multi-head latent attention has as many key heads as query heads.
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# At random weights the indexer's scores tie, being cut off at 0, and transformers breaks ties by the number of keys. So
# it selects all of these short texts.
_INDEXED: dict[str, Any] = {**_MLA, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 128}
_MINIMAX: dict[str, Any] = {"dense_intermediate_size": 64, "shared_intermediate_size": 32, "rotary_dim": 4}
_BLOCK_SPARSE: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 3,
}
_PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_TWO_ROPES: dict[str, Any] = {
    kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
}
_EXPERTS: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_d_head": 16}
_STATE_AND_ATTENTION: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA: dict[str, Any] = {
    **_STATE_AND_ATTENTION,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_DENSE = (
    Family("apertus", "xIELU"),
    Family("arcee", "squared ReLU"),
    Family("bitnet", "inner norms, tied heads", {"tie_word_embeddings": True}),
    Family("cohere", "parallel blocks, scaled logits"),
    Family("cohere2", "mixed windows, scaled logits", _MIXED),
    Family("cwm", "mixed windows", {**_MIXED, "bos_token_id": 1, "eos_token_id": 1}),
    Family("diffllama", "differential attention"),
    Family("doge", "dynamic mask attention", {"sliding_window": None}),
    Family("ernie4_5", "interleaved rotary"),
    Family("exaone4", "mixed windows, no rotary in full layers", {**_MIXED, "sliding_window_pattern": 2}),
    Family("gemma", "tied heads, scaled embeddings", {"tie_word_embeddings": True}),
    Family("gemma2", "mixed windows, softcapped scores and logits", {**_GEMMA, "final_logit_softcapping": 5.0}),
    Family("gemma3_text", "mixed windows, two rotary bases", _GEMMA),
    Family("glm", "partial rotary"),
    Family("glm4", "partial rotary, four norms"),
    Family("granite", "scaled logits", {"logits_scaling": 2.0}),
    Family("granite_swa", "mixed windows, sinks", _MIXED),
    Family("helium", "interleaved rotary"),
    Family("hunyuan_v1_dense", "norms of queries and keys"),
    Family("hyperclovax", "scaled logits"),
    Family("jais2", "squared ReLU"),
    Family("llama", "grouped queries"),
    Family("llama", "tied heads, multi-query", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Family("ministral", "window of 8", {"layer_types": ["sliding_attention"] * 2}),
    Family("ministral3", "grouped queries"),
    Family("mistral", "window of 8"),
    Family("nanochat", "softcapped logits, norms of queries and keys"),
    Family("nemotron", "partial rotary, squared ReLU"),
    Family("olmo", "norms without weights"),
    Family("olmo2", "norms after the blocks"),
    Family("olmo3", "mixed windows, norms after the blocks", _MIXED),
    Family("persimmon", "partial rotary, norms of queries and keys", {"num_key_value_heads": 4}),
    Family("phi", "partial rotary, parallel blocks"),
    Family("phi3", "fused projections"),
    Family("qwen2", "biases of queries, keys and values"),
    Family("qwen2", "window in the second layer", {"use_sliding_window": True, "max_window_layers": 1}),
    Family("qwen3", "norms of queries and keys"),
    Family("seed_oss", "biases of queries, keys and values"),
    Family("smollm3", "no rotary in some layers", {"no_rope_layers": [1, 0]}),
    Family("stablelm", "partial rotary"),
    Family("starcoder2", "window of 8"),
    Family("vaultgemma", "mixed windows, softcapped logits", {**_GEMMA, "final_logit_softcapping": 5.0}),
)

_EARLIER = (
    Family("biogpt", "learned positions"),
    Family("bloom", "ALiBi"),
    Family("codegen", "partial rotary, fused projections", {"rotary_dim": 4}),
    Family("ctrl", "sinusoidal positions", {"dff": 64}),
    Family("falcon", "multi-query, parallel blocks"),
    Family("falcon", "ALiBi", {"alibi": True}),
    Family("gpt2", "learned positions"),
    Family("gpt_bigcode", "learned positions, multi-query"),
    Family(
        "gpt_neo",
        "learned positions, windowed layers",
        {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    Family("gpt_neox", "partial rotary, parallel blocks"),
    Family("gpt_neox_japanese", "biases of the last layer only"),
    Family("gptj", "partial rotary", {"rotary_dim": 4}),
    Family(
        "modernbert-decoder", "mixed windows", {**_MIXED, "local_attention": 8, "bos_token_id": 1, "eos_token_id": 1}
    ),
    Family("mpt", "ALiBi"),
    Family("openai-gpt", "no cache", is_refused=True),
    Family("opt", "learned positions", {"word_embed_proj_dim": 32}),
    Family("xglm", "sinusoidal positions", {"attention_heads": 4}),
    Family("xlnet", "memories instead of a cache", {"d_head": 8, "d_inner": 64}, is_refused=True),
)

_OF_EXPERTS = (
    Family("afmoe", "mixed windows, gated attention", {**_MIXED, "num_dense_layers": 1}),
    Family("aria_text", "shared experts", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    Family("cohere2_moe", "mixed windows", _MIXED),
    Family("dots1", "shared experts", {**_EXPERTS, "first_k_dense_replace": 1}),
    Family("ernie4_5_moe", "biased router", {"moe_num_experts": 4, "moe_k": 2}),
    Family("exaone_moe", "mixed windows", {**_MIXED, **_EXPERTS}),
    Family("flex_olmo", "norms after the blocks"),
    Family("glm4_moe", "partial rotary", {"first_k_dense_replace": 1}),
    Family("gpt_oss", "mixed windows, sinks", _MIXED),
    Family("granitemoe", "scaled logits", {"logits_scaling": 2.0}),
    Family("granitemoeshared", "shared experts", {"shared_intermediate_size": 32}),
    Family("granitemoe_swa", "mixed windows, sinks", _MIXED),
    Family("hunyuan_v1_moe", "norms of queries and keys", {"moe_topk": [2, 2]}),
    Family("hy_v3", "norms of queries and keys"),
    Family("jetmoe", "experts of attention too", {"num_key_value_heads": 4, "kv_channels": 8}),
    Family(
        "llama4_text",
        "chunked attention",
        {"attention_chunk_size": 8, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]},
    ),
    Family("mellum", "mixed windows", _MIXED),
    Family("mimo_v2_flash", "mixed windows, sinks", _MIXED),
    Family("minimax_m2", "partial rotary", {"rotary_dim": 4}),
    Family("mixtral", "window of 8"),
    Family("olmoe", "norms of queries and keys"),
    Family("phimoe", "sparse mixer"),
    Family("qwen2_moe", "shared experts", {"shared_expert_intermediate_size": 32}),
    Family("qwen3_moe", "norms of queries and keys"),
    Family("solar_open", "partial rotary"),
)

_LATENT = (
    Family("axk1", "MLA", {**_MLA, **_EXPERTS}),
    Family("axk2", "MLA", {**_MLA, **_EXPERTS}),
    Family("deepseek_v2", "MLA", {**_MLA, "head_dim": 8, **_EXPERTS}),
    Family("deepseek_v3", "MLA", {**_MLA, **_EXPERTS}),
    Family("deepseek_v32", "MLA, indexed attention", {**_INDEXED, **_EXPERTS}),
    Family("glm4_moe_lite", "MLA", {**_MLA, **_EXPERTS}),
    Family("glm_moe_dsa", "MLA, indexed attention", {**_INDEXED, **_EXPERTS}),
    Family(
        "longcat_flash",
        "MLA, two attentions a layer",
        {
            **_MLA,
            "num_layers": 1,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    Family("minicpm3", "MLA, scaled logits", {**_MLA, "dim_model_base": 16}),
    Family("dots3_note_text", "MLA, indexed attention", {**_INDEXED, **_EXPERTS}),
    Family("hy_v4", "MLA, indexed attention, several streams", {**_INDEXED, **_EXPERTS, "hc_mult": 2}),
    Family("sarvam_mla", "MLA", {**_MLA, **_EXPERTS}),
    Family("youtu", "MLA", _MLA),
)

_UNUSUAL = (
    Family("cohere_compass_text", "mixed windows", {**_MIXED, "rope_parameters": _TWO_ROPES}),
    Family("cpmant", "puts tokens of its own before the prompt", {"dim_head": 8, "dim_ff": 64}, is_refused=True),
    Family("dory", "mixed windows, layers run twice", {**_MIXED, "n_input_layers": 0, "n_output_layers": 0}),
    Family("flint", "mixed windows, shared experts", {**_MIXED, "shared_expert_intermediate_size": 32}),
    Family("gemma3n_text", "mixed windows, embeddings per layer", {**_MIXED, **_PER_LAYER, "num_kv_shared_layers": 0}),
    Family("gemma3n_text", "layers that share keys", {**_PER_LAYER, **_SHARED_KEYS}),
    Family("gemma4_text", "mixed windows, embeddings per layer", {**_MIXED, **_PER_LAYER, "global_head_dim": 8}),
    Family("gemma4_text", "layers that share keys", {**_PER_LAYER, **_SHARED_KEYS, "global_head_dim": 8}),
    Family("gemma4_unified_text", "mixed windows", {**_MIXED, "global_head_dim": 8}),
    Family("hrm_text", "two stacks, run in turns", {"num_hidden_layers": 1}, noise=0.005),
    Family("kolibri1", "windows of 8", {"shared_expert_intermediate_size": 32}),
    Family("laguna", "mixed windows, gated attention", {**_MIXED, "shared_expert_intermediate_size": 32}),
    Family("minimax_m3_vl_text", "capped experts", _MINIMAX),
    Family("minimax_m3_vl_text", "block-sparse attention", {**_MINIMAX, **_BLOCK_SPARSE}, is_refused=True),
)

_OF_STATE = tuple(
    Family(model_type, remark, settings, is_refused=True)
    for model_type, remark, settings in (
        ("bailing_hybrid", "delta rule and MLA", {**_STATE_AND_ATTENTION, **_MLA, "q_lora_rank": None}),
        ("bamba", "Mamba and attention", {**_MAMBA, "attn_layer_indices": [1]}),
        ("deepseek_v4", "compressed attention", {}),
        ("falcon_h1", "Mamba and attention", {**_MAMBA, "mamba_d_ssm": 64}),
        ("falcon_mamba", "Mamba", {"state_size": 8}),
        ("granitemoehybrid", "Mamba and attention", {**_MAMBA, **_STATE_AND_ATTENTION}),
        (
            "inkling_text",
            "convolutions and windows",
            {
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 8,
                "sliding_window_size": 8,
                "d_rel": 4,
                "rel_extent": 32,
                "mlp_layer_types": ["dense", "sparse"],
            },
        ),
        ("jamba", "Mamba and attention", {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}),
        (
            "kimi_linear",
            "delta rule and MLA",
            {**_STATE_AND_ATTENTION, **_MLA, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
        ),
        (
            "lara_mini",
            "delta rule and windows",
            {**_DELTA, "layer_types": ["linear_attention", "sliding_attention"], "shared_expert_intermediate_size": 32},
        ),
        ("lfm2", "convolutions and attention", {"layer_types": ["conv", "full_attention"]}),
        ("lfm2_moe", "convolutions and attention", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
        ("lfm3", "convolutions and attention", {}),
        ("mamba", "Mamba", {"state_size": 8}),
        ("mamba2", "Mamba 2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
        ("minimax", "lightning attention", _STATE_AND_ATTENTION),
        (
            "nemotron_h",
            "Mamba and attention",
            {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
        ),
        ("olmo_hybrid", "delta rule and attention", {**_DELTA, "linear_num_key_heads": 4}),
        ("qwen3_5_text", "delta rule and attention", _DELTA),
        ("qwen3_5_moe_text", "delta rule and attention", _DELTA),
        ("qwen3_next", "delta rule and attention", _DELTA),
        (
            "recurrent_gemma",
            "recurrent units and windows",
            {"block_types": ["recurrent", "attention"], "attention_window_size": 8, "num_key_value_heads": 1},
        ),
        ("rwkv", "RWKV", {}),
        ("xlstm", "xLSTM", {"num_heads": 2, "hidden_size": 128}),
        ("zamba", "Mamba and attention", {"layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8}),
        ("zamba2", "Mamba 2 and attention", {"layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8}),
        ("zaya", "convolutions in attention", {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    )
)

FAMILIES: tuple[Family, ...] = _DENSE + _EARLIER + _OF_EXPERTS + _LATENT + _UNUSUAL + _OF_STATE
