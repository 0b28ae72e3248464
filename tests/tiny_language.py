"""A language model and a tokenizer of a few kilobytes, made without a network."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

_SPECIAL = ("<unk>", "<pad>", "<eos>")
WORDS = (*_SPECIAL, *(f"w{number}" for number in range(98)))
#: Of a transformer; the vocabulary is a multiple of no world size.
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = {word: number for number, word in enumerate(WORDS)}
    unknown, padding, end = _SPECIAL
    made = Tokenizer(WordLevel(words, unk_token=unknown))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=unknown, pad_token=padding, eos_token=end
    )


def model() -> Any:
    """A Qwen2 whose output embedding is its input embedding, of random weights."""
    config = Qwen2Config(
        **SIZES, tie_word_embeddings=True, dtype="float32", pad_token_id=1, eos_token_id=2
    )
    return AutoModelForCausalLM.from_config(config)
