"""Tiny random models of the real transformers classes, one for each architecture preimage supports."""

import functools

import torch
import transformers as t
from torch import nn

import preimage
from preimage.models import LanguageModel

VOCABULARY = 41
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WITHOUT_GROUPS = {k: v for k, v in _SHAPE.items() if k != "num_key_value_heads"}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
_OPT = {k: v for k, v in _WITHOUT_GROUPS.items() if k != "intermediate_size"}

# Windows shorter than the longest test prompt, so that windowed attention is really used.
CONFIGS = {
    "gpt2": lambda: t.GPT2Config(**_GPT2, bos_token_id=1, eos_token_id=2),
    "gpt_neox": lambda: t.GPTNeoXConfig(**_WITHOUT_GROUPS),
    "opt": lambda: t.OPTConfig(**_OPT, ffn_dim=48, word_embed_proj_dim=32),
    "llama": lambda: t.LlamaConfig(**_SHAPE),
    "mistral": lambda: t.MistralConfig(**_SHAPE, sliding_window=7),
    "qwen2": lambda: t.Qwen2Config(**_SHAPE),
    "qwen3": lambda: t.Qwen3Config(**_SHAPE, head_dim=8),
    "gemma2": lambda: t.Gemma2Config(**_SHAPE, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": lambda: t.Gemma3TextConfig(
        **_SHAPE, head_dim=8, sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=8
    ),
    "phi3": lambda: t.Phi3Config(**_SHAPE),
    "olmo2": lambda: t.Olmo2Config(**_SHAPE),
    "mixtral": lambda: t.MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
}
NAMES = tuple(CONFIGS)


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """A fresh transformers module with random weights."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    return t.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def opt_with_projection(seed: int = 0, **changes: object) -> nn.Module:
    """OPT whose embeddings are narrower than its blocks: a projection follows the table."""
    return build("opt", seed, word_embed_proj_dim=16, **changes)


@functools.cache
def tiny(name: str, seed: int = 0) -> LanguageModel:
    """The same, loaded by preimage; shared between tests, which must not change it."""
    return preimage.load(build(name, seed))


def random_ids(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()
