"""vLLM inside the training rank. All contact with vLLM is here; vllm is imported when an engine is made.

The engine holds the device while it is awake. Asleep (vLLM's level 2) it keeps no weights; they are loaded
again at each step. The order in `load` keeps the peak of memory low:

    asleep -> allocate weights -> stream the policy's weights in -> free what was gathered -> allocate the KV
    cache -> awake

Other versions than vLLM 0.32 are refused. Asleep at level 2, 0.26 loses state that is made once with the KV
cache; 0.32 keeps it. No other version was tested.
"""

import contextlib
import os
import sys
import time

import numpy as np
import torch

from configs import UserError, require
from engine import Engine, free_cache

VERSION = "0.32"  # the vLLM that is supported


class VLLMEngine(Engine):
    """vLLM's LLM with the `external_launcher` executor: `tp` neighbouring ranks are one engine."""

    needs_selfcheck = True

    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        LLM = _import_vllm()
        # On a CPU, compilation would take minutes, so it is off. Chunked prefill is off on a CPU too: with a
        # seeded request, vLLM 0.32 fails on a part of a prompt ("CPU Generator does not use offset").
        memory = (dict(gpu_memory_utilization=cfg.engine_share, enable_sleep_mode=True)
                  if self.device.type == "cuda" else
                  dict(kv_cache_memory_bytes=2**28, enforce_eager=True, enable_chunked_prefill=False,
                       max_num_batched_tokens=max(4096, cfg.engine_len, cfg.max_num_seqs)))
        rng = torch.get_rng_state()
        with self.engine_errors("to start"), contextlib.nullcontext() if cfg.verbose else _muted():
            self.llm = LLM(
                model=path, dtype=str(dtype).removeprefix("torch."), max_model_len=cfg.engine_len,
                max_num_seqs=cfg.max_num_seqs, seed=self.rank // cfg.tp, tensor_parallel_size=cfg.tp,
                distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs",
                load_format="dummy", enable_prefix_caching=True, disable_log_stats=True, **memory)
        torch.set_rng_state(rng)  # LLM() reseeds every generator
        self._sleep()

    def load(self, weights):
        self.llm.wake_up(tags=["weights"])
        self.ledger.mark("weights")
        # vLLM reads some weights again after FSDP has freed them, so these weights are copied. vLLM keeps a
        # tied embedding until the last weight has come. It keeps an embedding or head if it pads the rows.
        must_copy = self.config.tie_word_embeddings or self.config.vocab_size % (64 * self.cfg.tp)
        copied = ("embed_tokens.weight", "lm_head.weight") if must_copy else ()
        stream = ((name, tensor.clone() if name.endswith(copied) else tensor) for name, tensor in weights)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        self.llm.apply_model(_repack_tied_head)
        free_cache(self.device)
        self.ledger.mark("sync")
        self.llm.wake_up(tags=["kv_cache"])
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache")
        assert not self.llm.llm_engine.is_sleeping(), "vLLM did not wake"

    def unload(self):
        """Abort the running requests, and sleep. An engine that failed while it woke can't sleep and is left
        as it is."""
        engine = self.llm.llm_engine
        if engine.has_unfinished_requests():
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if not engine.is_sleeping():
            self.llm.sleep(level=2)
            assert engine.is_sleeping(), "vLLM did not fall asleep"

    def generate(self, requests, limits, temperature, key, version):
        """See Engine.generate. All ranks of one vLLM engine must queue the same requests in the same order.
        So each rank queues the requests of all these ranks, and yields the responses to its own requests."""
        self.check(version)
        queued = {}
        for of_rank in self.gather({k: (requests[k], limits[k]) for k in requests}):
            queued |= of_rank
        key_of = self._enqueue(queued, temperature, key)
        for output in self._finished(version, len(queued)):
            k = key_of[output.request_id]
            if k in requests:
                response = output.outputs[0]
                ids = np.array(response.token_ids, dtype=np.int32)
                yield self.sample(k, requests[k], ids, _sampled_logprobs(response.logprobs, ids),
                                  response.finish_reason == "stop")

    def _enqueue(self, queued, temperature, key):
        """Queue requests, (prompt_id, sample_id) -> tokens and limit, longest first. Returns the key of each
        of vLLM's request ids."""
        from vllm import SamplingParams

        order = sorted(queued, key=lambda k: (-len(queued[k][0]), k))
        params = [SamplingParams(
            temperature=temperature, max_tokens=queued[k][1],
            seed=int(np.random.SeedSequence((*key, *k)).generate_state(1, np.uint32)[0]), logprobs=0,
            stop=list(self.cfg.stop), stop_token_ids=sorted(self.eos), flat_logprobs=True,
            skip_special_tokens=False) for k in order]
        prompts = [{"prompt_token_ids": list(queued[k][0])} for k in order]
        ids = self.llm.enqueue(prompts, params, use_tqdm=False)
        # enqueue returns "id-uuid"; an output has "id".
        return {i.partition("-")[0]: k for i, k in zip(ids, order, strict=True)}

    def _finished(self, version, responses):
        """Yields vLLM's outputs as they finish. Raises RuntimeError if vLLM fails or takes more than 90 % of
        --stall_limit seconds. At 100 % guard/watch.py would end the run, with a message that says less."""
        engine, start, limit = self.llm.llm_engine, time.monotonic(), self.cfg.stall_limit
        while engine.has_unfinished_requests():
            with self.engine_errors(f"to sample with the weights of step {version}"):
                outputs, seconds = engine.step(), time.monotonic() - start
                if seconds > 0.9 * limit:
                    left = engine.get_num_unfinished_requests()
                    raise TimeoutError(f"{left} of {responses} responses have not ended after {seconds:.0f} "
                                       f"s (--stall_limit {limit:g})")
            yield from (output for output in outputs if output.finished)


def _import_vllm():
    """Returns vLLM's class LLM. Sets the environment variables that vLLM reads at its first import. Raises
    UserError if vLLM can't be imported or has another version than VERSION."""
    for name, value in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
                            VLLM_NO_USAGE_STATS="1").items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():  # else torch would compile for 13 s at vLLM's first call on a CPU
        torch._dynamo.config.disable = True
    try:
        from vllm import LLM, __version__
    except ImportError as e:
        raise UserError(f"--engine vllm, and vllm can't be imported ({str(e).splitlines()[0][:80]}); "
                        "needed: pip install -r requirements.txt, or --engine torch") from None
    # The added dots match whole numbers: 0.32 and 0.32.1 pass, 0.320 does not.
    tested = f"{__version__}.".startswith(f"{VERSION}.") or "TORZ_ANY_VLLM" in os.environ
    require(tested, f"--engine vllm, and vllm is {__version__}",
            f"pip install -r requirements.txt (vllm {VERSION}), or --engine torch")
    return LLM


@contextlib.contextmanager
def _muted():
    """Send stdout and stderr of this process, native code included, to /dev/null."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
            os.close(copy)


def _repack_tied_head(model):
    """vLLM's CPU build keeps a packed copy of a tied head. A reload leaves it stale, without an error."""
    head = getattr(model, "lm_head", None)
    tied = head is not None and head.weight is model.model.embed_tokens.weight
    if tied and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


def _sampled_logprobs(logprobs, ids):
    """Returns (L,) log-probs of the sampled tokens. vLLM's flat list may have several tokens a position; the
    sampled token is the first of them."""
    flat = np.array(logprobs.logprobs, dtype=np.float32)
    starts = np.array(logprobs.start_indices)
    assert (np.array(logprobs.token_ids)[starts] == ids).all()
    return flat[starts]
