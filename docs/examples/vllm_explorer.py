"""Roll out beside a vLLM server: python vllm_explorer.py JOB URL LAST_STEP."""

import sys

import httpx2

from explorer_hooks import ExplorerHook, VLLMServer

job, url, last_step = sys.argv[1], sys.argv[2], int(sys.argv[3])


def generate(tokens):
    """Eight tokens by the weights that the server has now."""
    body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    return answer.raise_for_status().json()["choices"][0]["token_ids"]


step = 0
with ExplorerHook(job, "server-0", VLLMServer(url)) as hook:
    while step < last_step:
        step = hook.pull().step  # waits for newer weights; the server pauses only for the load
        print(f"step {step}: {generate([1, 2, 3])}", flush=True)
