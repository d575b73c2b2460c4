"""The self-check: compares the log-probs of engine and trainer before the first step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

import dist
from configs import Config
from data import Problem, Sample, pack
from engine import Engine
from guard.messages import require
from rollout import CHECK

CHECK_TOKENS = 16  # length of a response in the self-check, in tokens
# Largest allowed mean of |engine's log-prob - trainer's log-prob|, in nats a token.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}

# Columns: start of the error message; factor that multiplies the engine's weights; order of a prompt's tokens
# (-1: reversed); likely causes. vLLM's prefix cache has no keys and values for the reversed prompts until the
# second stage, which computes them with halved weights. If the cache is not reset after that, the third stage
# reads these keys and values, and fails.
STAGES = (
    (
        "after the first sync",
        1.0,
        1,
        "weights that didn't arrive (a layer, a tied head), another dtype, "
        "a temperature other than --temperature in the engine, top-p or top-k, "
        "a model that the engine computes differently",
    ),
    (
        "a sync of halved weights changed nothing",
        0.5,
        -1,
        "syncs don't reach the weights that are in use",
    ),
    (
        "after a sync of other weights and back",
        1.0,
        -1,
        "buffers that are lost in sleep and not restored by a sync, "
        "a prefix cache that was not reset, or weights that only the first sync loads",
    ),
)


@dist.phase("start/selfcheck")
def check_engine(engine: Engine, policy: nn.Module, problems: Sequence[Problem]) -> str:
    """Runs `selfcheck` with the policy's weights. Returns a line that says how well the log-probs of engine
    and trainer agree. Raises UserError if `selfcheck` finds an error on any rank."""

    device = engine.device

    @torch.no_grad()
    def trainer_logp(samples, temperature):
        p = pack(samples).to(device)
        with dist.on_device(policy, None, device):
            logp, _ = policy(p, temperature)
            return logp[p.mask]

    weights = partial(dist.full_weights, policy, device)
    prompts = check_prompts(problems, engine.cfg)
    results = dist.gather(selfcheck(engine, weights, trainer_logp, prompts))
    for rank, (error, _) in enumerate(results):
        require(
            not error,
            f"self-check: on rank {rank}, {error}",
            "a fix of the cause, or --no-selfcheck to train anyway",
        )
    largest = max(gap for _, gap in results)
    return f"self-check: engine and trainer agree to {largest:.1e} nats a token"


def check_prompts(problems: Sequence[Problem], cfg: Config) -> dict[int, list[int]]:
    """Returns the prompts for `selfcheck` as a dict: prompt_id -> tokens. To test vLLM's prefix cache, the
    last prompt has 300 tokens, or fewer if the run's maximum length is smaller. The cache stores only whole
    blocks (16 tokens on GPUs, 128 on CPUs)."""
    limit = max(1, cfg.model_len - CHECK_TOKENS)
    tokens = [*chain(*(p.ids for p in problems[:64]))]  # repeated below, to make a long prompt
    prompts = [list(p.ids) for p in problems[:4]]
    prompts.append((tokens * 300)[:300])
    return {prompt_id: prompt[:limit] for prompt_id, prompt in enumerate(prompts)}


def selfcheck(
    engine: Engine,
    weights: Callable[[], dist.Weights],
    trainer_logp: Callable[[list[Sample], float], Tensor],
    prompts: Mapping[int, Sequence[int]],
) -> tuple[str, float]:
    """Compares the log-probs of engine and trainer. Returns a pair: an error message about the first failed
    stage, or "" if no stage failed; and the largest gap, in nats a token.

    In each stage the engine wakes, gets weights, answers `prompts` (prompt_id -> tokens) by sampling, and
    sleeps. A gap is the mean of |engine's log-prob - trainer's log-prob| over a stage's responses. Each gap
    must be at most TOLERANCE. In one stage, the weights are halved. There, the gap must be larger than
    TOLERANCE, and does not count for the largest gap.

    weights(): the policy's weights, for `Engine.awake`
    trainer_logp(samples, temperature): the trainer's log-probs of all response tokens

    The ranks of one engine must go through all stages together."""
    cfg = engine.cfg
    tolerance = TOLERANCE[engine.dtype]
    error = ""
    largest = 0.0
    for when, scale, direction, causes in STAGES:
        requests = {(i, 0): prompt[::direction] for i, prompt in prompts.items()}
        limits = dict.fromkeys(requests, CHECK_TOKENS)
        seed = cfg.seed, CHECK  # CHECK: a number that no other seed has
        with engine.awake(((name, x * scale) for name, x in weights()), version=-1):
            samples = [*engine.generate(requests, limits, cfg.temperature, seed, -1)]
        logp = trainer_logp(samples, cfg.temperature).float().cpu().numpy()
        gaps = np.abs(logp - np.concatenate([s.logp for s in samples]))
        gap = float(gaps.mean())
        should_agree = scale == 1  # else the weights are halved
        if should_agree:
            largest = max(largest, gap)
        agree = gap <= tolerance  # False also if the gap is NaN
        if agree != should_agree and not error:  # only the first error is kept
            error = (
                f"{when}: engine and trainer differ by {gap:.3g} nats a token "
                f"(limit {tolerance:g}), by up to {gaps.max():.3g}; likely causes: {causes}"
            )
    return error, largest
