"""Images that an SGLang answers again: after each load it says what transformers says of them."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from explorer_hooks.hook import ExplorerHook
from tests.engines import tiny_models
from tests.engines.sglang_process import SGLangProcess, require
from tests.engines.tiny_models import publish_model
from tests.engines.tiny_vision import SIDE, VOCABULARY, WORDS, agrees, fill, image_file, pixels
from tests.engines.waiting import LONG
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.deep, pytest.mark.timeout(1800)]

START, END, IMAGE = 120, 121, 122
SPECIAL = {START: "<|vision_start|>", IMAGE: "<|image_pad|>", END: "<|vision_end|>"}
PATCHES = 2
CONFIG = Qwen2VLConfig(
    text_config=tiny_models.CONFIG.to_diff_dict()
    | {
        "vocab_size": VOCABULARY,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
        },
    },
    vision_config={
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 128,
        "num_heads": 2,
        "in_chans": 3,  # as SGLang calls them
        "patch_size": SIDE // PATCHES,
    },
    image_token_id=IMAGE,
    vision_start_token_id=START,
    vision_end_token_id=END,
    tie_word_embeddings=False,
)
PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "patch_size": SIDE // PATCHES,
    "min_pixels": SIDE * SIDE,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def model(seed: int) -> Qwen2VLForConditionalGeneration:
    made = Qwen2VLForConditionalGeneration(CONFIG)
    fill(made, seed, lambda name: "visual" in name)
    return made


def save_model(folder: Path, seed: int) -> Path:
    words = {SPECIAL.get(token, f"<{token}>"): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, "<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[END]).save_pretrained(
        folder
    )
    model(seed).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return folder


def truth(seed: int, image: Tensor) -> Tensor:
    """The log probability of each token after an image and the words."""
    values = ((image / 255 - 0.5) / 0.5).permute(2, 0, 1).repeat(2, 1, 1, 1)
    side = SIDE // PATCHES
    patches = values.reshape(2, 3, PATCHES, side, PATCHES, side).permute(2, 4, 1, 0, 3, 5)
    prompt = torch.tensor([[START, IMAGE, END, *WORDS]])
    with torch.no_grad():
        logits = model(seed)(
            input_ids=prompt,
            pixel_values=patches.reshape(PATCHES**2, -1),
            image_grid_thw=torch.tensor([[1, PATCHES, PATCHES]]),
            mm_token_type_ids=(prompt == IMAGE).int(),
        ).logits
    return logits[0, -1].log_softmax(-1)


def says(server: SGLangProcess, seed: int, image: Tensor) -> bool:
    body: dict[str, Any] = {
        "text": "".join([*SPECIAL.values(), *(f" <{word}>" for word in WORDS)]),
        "image_data": [base64.b64encode(image_file(image)).decode()],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    (place,) = server.ask("/generate", body)["meta_info"]["output_top_logprobs"]
    return agrees({token: logprob for logprob, token, _ in place}, truth(seed, image))


def test_new_weights_are_in_every_answer_of_a_server_that_reports_that_it_keeps_none(
    job: SmallJob, tmp_path: Path
) -> None:
    require()
    images = [pixels(seed) for seed in (1, 2)]
    base, log = save_model(tmp_path / "base", 0), tmp_path / "log.txt"
    variables = {"SGLANG_EXPOSE_OWN_ENV_VARS": "1", "SGLANG_VLM_CACHE_SIZE_MB": "0"}
    with (
        SGLangProcess(base, log, has_tokenizer=True, **variables).up() as server,
        ExplorerHook(job.root, "explorer", server.engine(), poll=0.05) as hook,
    ):
        for step, seed in enumerate((0, 1, 0), 1):
            saved = load_file(save_model(tmp_path / f"saved-{step}", seed) / "model.safetensors")
            publish_model(job, step, saved, CONFIG)
            assert hook.pull(LONG).step == step
            for image in images * 2:
                assert says(server, seed, image)
            assert not says(server, 1 - seed, images[0])
