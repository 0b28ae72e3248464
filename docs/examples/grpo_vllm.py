"""Train by GRPO with vLLM servers: python grpo_vllm.py JOB MODEL STEPS URL URL."""

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2
import torch
from transformers import AutoModelForCausalLM

from trainer_hooks import TrainerHook

GROUP, LENGTH, CLIP = 8, 8, 0.2
job, base, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
servers = {f"server-{number}": url for number, url in enumerate(sys.argv[4:])}
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def roll_out(server, prompt):
    """A group of answers: tokens, their log-probabilities, and the version behind each token."""
    sampling = {"n": GROUP, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": sampling}
    answer = httpx2.post(f"{servers[server]}/inference/v1/generate", json=body, timeout=300)
    choices = answer.raise_for_status().json()["choices"]
    tokens = torch.tensor([choice["token_ids"] for choice in choices])
    contents = [choice["logprobs"]["content"] for choice in choices]
    logprobs = torch.tensor([[token["logprob"] for token in content] for content in contents])
    versions = [
        [s["version"] for s in choice["weight_versions"] for _ in range(s["start"], s["end"])]
        for choice in choices
    ]
    return tokens, logprobs, versions


def grpo_loss(prompt, tokens, old, rewards):
    """The clipped objective; an advantage is a reward that is normalized in its group."""
    advantages = ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4))[:, None]
    context = torch.tensor(prompt).expand(len(tokens), -1)
    logits = model(torch.cat([context, tokens], dim=1)).logits[:, len(prompt) - 1 : -1]
    new = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    ratio = (new - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


with TrainerHook(job, model, optimizer=optimizer) as hook, ThreadPoolExecutor() as threads:
    hook.save_state_dict(0)  # the servers may have been started with other weights
    for step in range(steps):
        served = hook.wait_served(step, servers, timeout=600)
        if served.missing:
            print(f"step {step}: {dict(served.missing)}", flush=True)
        names = [*served.serving] or sys.exit("no server has the weights")
        prompts = torch.randint(0, model.config.vocab_size, (len(names), 4)).tolist()
        rollouts = threads.map(roll_out, names, prompts)
        for name, prompt, (tokens, old, versions) in zip(names, prompts, rollouts, strict=True):
            print(f"step {step}: {name} {sorted(set().union(*versions))}", flush=True)
            # Not the tokens of other weights, as of a server that was just restarted.
            fresh = [all(one.startswith(f"step-{step}-") for one in each) for each in versions]
            if any(fresh):
                rewards = (tokens[fresh] % 2 == 0).float().mean(dim=1)  # for even tokens
                (grpo_loss(prompt, tokens[fresh], old[fresh], rewards) / len(names)).backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.after_step(step + 1)
