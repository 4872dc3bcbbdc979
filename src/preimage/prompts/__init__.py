"""Prompt sets: where prompts come from, and the token ids they become.

Quick to import: torch and transformers are never needed here; pyarrow and datasets only by the
sources that read with them.
"""

from preimage.prompts.corpus import documents
from preimage.prompts.gathering import Vocabulary, gather
from preimage.prompts.hard_pairs import HardPair, hard_pairs
from preimage.prompts.prompt_set import PromptOptions, PromptSet
from preimage.prompts.tokens import Tokenizer, encode, listed, window_bos

__all__ = [
    "HardPair",
    "PromptOptions",
    "PromptSet",
    "Tokenizer",
    "Vocabulary",
    "documents",
    "encode",
    "gather",
    "hard_pairs",
    "listed",
    "window_bos",
]
