"""A llama as a GGUF file, written by llama.cpp's own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerFast

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, module: nn.Module, tokenizer: PreTrainedTokenizerFast, skip: str = "") -> Path:
    """A llama as llama.cpp's converter writes it, in float32."""
    config: Any = module.config
    raw = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in raw["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in module.state_dict().items():
        name = name.removesuffix(".weight")
        prefix = ""
        if name.startswith("model.layers."):
            _, _, number, name = name.split(".", 3)
            prefix = f"blk.{number}."
        name, array = _GGUF_NAMES[name], weight.numpy()
        if name in heads:  # the two halves of a rotation lie side by side there, not apart
            array = array.reshape(heads[name], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if name != skip:
            writer.add_tensor(f"{prefix}{name}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
