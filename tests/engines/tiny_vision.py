"""Tiny models that see, adapters of their vision tower, and what transformers says by both.

BLIP-2, because vLLM reads it without torchvision, and takes such adapters.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.engines import tiny_models
from tests.engines.vllm_process import MODEL, VLLMProcess

SIDE, QUERIES, VOCABULARY = 28, 4, 128
IMAGE, WORDS = 4, (9, 10, 11)
_SIZES: Any = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIG = Blip2Config(
    vision_config=_SIZES | {"image_size": SIDE, "patch_size": SIDE // 2},
    qformer_config=_SIZES | {"encoder_hidden_size": 128, "cross_attention_frequency": 1},
    text_config=_SIZES
    | {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "ffn_dim": 128,
        "word_embed_proj_dim": 128,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    architectures=["Blip2ForConditionalGeneration"],
    num_query_tokens=QUERIES,
    image_token_index=IMAGE,
    tie_word_embeddings=False,
)
_PROCESSOR = {"processor_class": "Blip2Processor", "num_query_tokens": QUERIES}
_PIXELS = {
    "image_processor_type": "BlipImageProcessor",
    "do_resize": False,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def model(seed: int) -> Blip2ForConditionalGeneration:
    """In float32."""
    made = Blip2ForConditionalGeneration(CONFIG)
    fill(made, seed, lambda name: "language_model" not in name)
    return made


def fill(made: PreTrainedModel, seed: int, sees: Callable[[str], bool]) -> None:
    """Let all seeds have one language model, and differ in what they see."""
    made.eval()
    with torch.no_grad():
        for eyes in (False, True):
            torch.manual_seed(seed if eyes else 0)
            for name, parameter in made.named_parameters():
                if parameter.dim() > 1 and eyes == sees(name):
                    parameter.normal_(0, 0.3)


def save_model(folder: Path, seed: int) -> Path:
    """What a server is started with."""
    words = {f"<{token}>": token for token in range(VOCABULARY)}
    words["<image>"] = words.pop(f"<{IMAGE}>")
    tokenizer = Tokenizer(models.WordLevel(words, "<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(
        folder
    )
    CONFIG.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PIXELS))
    save_file(model(seed).state_dict(), folder / "model.safetensors")
    return folder


def adapter(seed: int) -> PeftModel:
    """Model 0 with an adapter of its vision tower."""
    made = tiny_models.adapter(seed, model(0), r"vision_model.*fc1")
    made.peft_config["default"].target_modules = ["fc1"]  # vLLM takes a list alone
    return made.eval()


def pixels(seed: int) -> Tensor:
    """An image: height, width and 3 colours, uint8."""
    shape = (SIDE, SIDE, 3)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).byte()


def image_file(image: Tensor) -> bytes:
    """An image as a file, of a format that needs no library."""
    return b"P6 %d %d 255\n" % (SIDE, SIDE) + image.numpy().tobytes()


def truth(sees: nn.Module, image: Tensor) -> Tensor:
    """The log probability of each token after an image and the words."""
    prompt = torch.tensor([[IMAGE] * QUERIES + list(WORDS)])
    values = ((image / 255 - 0.5) / 0.5).permute(2, 0, 1)[None]
    with torch.no_grad():
        logits = sees(input_ids=prompt, pixel_values=values).logits
    return logits[0, -1].log_softmax(-1)


def seen(server: VLLMProcess, image: Tensor, model: str = MODEL) -> dict[int, float]:
    """The log probabilities of the 20 most probable tokens, as a server says them."""
    content = base64.b64encode(image_file(image)).decode()
    url = f"data:image/x-portable-pixmap;base64,{content}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "".join(f" <{word}>" for word in WORDS)},
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = server.ask("/v1/chat/completions", body)["choices"]
    (place,) = choice["logprobs"]["content"]
    return {
        int(top["token"].removeprefix("token_id:")): top["logprob"] for top in place["top_logprobs"]
    }


def agrees(said: dict[int, float], expected: Tensor) -> bool:
    """True if it is what transformers says, to the accuracy of float32."""
    return all(abs(expected[token] - value) < 0.01 for token, value in said.items())
