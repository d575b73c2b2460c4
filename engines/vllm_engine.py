"""An engine that runs vLLM inside each training rank.

Awake, the engine uses --engine_share of the GPU's memory. Asleep (vLLM's sleep level 2), it has no weights
and no KV cache. `load` allocates the KV cache last, to keep the peak memory low.

Only tested versions of vLLM are accepted. Other versions may not restore the whole engine after sleep: vLLM
0.26 loses a part of its state."""

import os
import warnings

import numpy as np
import torch

from configs import explained, require
from engine import Engine

VERSIONS = ("0.32", "0.33")


class VLLMEngine(Engine):
    """Runs vLLM's class LLM in the process of each training rank. With --tp N, each group of N neighbouring
    ranks is one engine."""

    needs_selfcheck = True

    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        LLM = _import_vllm()
        # On a CPU, compilation would take minutes, and chunked prefill raises an error for requests that have
        # a seed (vLLM 0.32).
        memory = (dict(gpu_memory_utilization=cfg.engine_share, enable_sleep_mode=True)
                  if self.device.type == "cuda" else
                  dict(kv_cache_memory_bytes=2**28, enforce_eager=True, enable_chunked_prefill=False,
                       max_num_batched_tokens=max(4096, cfg.engine_len, cfg.max_num_seqs)))
        with self.engine_errors("to start"), warnings.catch_warnings(action="ignore"):
            self.llm = LLM(
                model=path, dtype=str(dtype).removeprefix("torch."), max_model_len=cfg.engine_len,
                max_num_seqs=cfg.max_num_seqs, seed=self.rank // cfg.tp, tensor_parallel_size=cfg.tp,
                distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs",
                load_format="dummy", use_tqdm_on_load=False, enable_prefix_caching=True,
                disable_log_stats=True, **memory)
        self._sleep()

    def load(self, weights):
        self.llm.wake_up(tags=["weights"])
        self.ledger.mark("weights")
        # For some models, vLLM copies the embedding and the output layer only after it has received the last
        # weight. FSDP has then freed both tensors, so vLLM gets clones.
        copied = "embed_tokens.weight", "lm_head.weight"
        stream = ((name, tensor.clone() if name.endswith(copied) else tensor) for name, tensor in weights)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        self.llm.apply_model(_repack_tied_head)
        torch.cuda.empty_cache()
        self.ledger.mark("sync")
        self.llm.wake_up(tags=["kv_cache"])
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache")
        assert not self.llm.llm_engine.is_sleeping(), "vLLM did not wake"

    def unload(self):
        """Abort unfinished requests, then sleep. After a failed wake-up, vLLM still counts as asleep, so
        `sleep` is not called."""
        engine = self.llm.llm_engine
        if engine.has_unfinished_requests():
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if not engine.is_sleeping():
            self.llm.sleep(level=2)
            assert engine.is_sleeping(), "vLLM did not fall asleep"

    def generate(self, requests, limits, temperature, key, version, top_p=1.0):
        """All ranks of an engine must give vLLM the same requests in the same order. So each rank queues the
        requests of all ranks of its engine, but yields only the responses to the rank's own `requests`."""
        self.check(version)
        queued = {}
        for of_rank in self.gather({k: (requests[k], limits[k]) for k in requests}):
            queued |= of_rank
        key_of = self._enqueue(queued, temperature, key, top_p)
        for output in self._finished(version):
            k = key_of[output.request_id]
            if k in requests:
                response = output.outputs[0]
                # _enqueue sets logprobs=0: vLLM then returns only the log-probs of the sampled tokens.
                assert response.logprobs.token_ids == list(response.token_ids)
                ids = np.array(response.token_ids, dtype=np.int32)
                logp = np.array(response.logprobs.logprobs, dtype=np.float32)
                yield self.sample(k, requests[k], ids, logp, response.finish_reason == "stop")

    def _enqueue(self, queued, temperature, key, top_p):
        """Queue requests, longest prompts first. Returns a dict: vLLM's request id -> k, which is (prompt_id,
        sample_id).

        queued: k -> (prompt tokens, largest number of response tokens)"""
        from vllm import SamplingParams

        order = sorted(queued, key=lambda k: (-len(queued[k][0]), k))
        params = [SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=queued[k][1],
            seed=int(np.random.SeedSequence((*key, *k)).generate_state(1, np.uint32)[0]), logprobs=0,
            stop=list(self.cfg.stop), stop_token_ids=sorted(self.eos), flat_logprobs=True,
            skip_special_tokens=False) for k in order]
        prompts = [{"prompt_token_ids": list(queued[k][0])} for k in order]
        ids = self.llm.enqueue(prompts, params, use_tqdm=False)
        # `enqueue` of vLLM returns "ID-UUID", but the request_id of an output is "ID".
        return {i.partition("-")[0]: k for i, k in zip(ids, order, strict=True)}

    def _finished(self, version):
        """Yields vLLM's output of each response that ends. Raises RuntimeError if vLLM fails."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            with self.engine_errors(f"to sample with the weights of step {version}"):
                outputs = engine.step()
            yield from (output for output in outputs if output.finished)


def _import_vllm():
    """Returns vLLM's class LLM. Raises UserError if vLLM is missing, or if its version is not in VERSIONS and
    the environment variable TORZ_ANY_VLLM is not set."""
    for name, value in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
                            VLLM_NO_USAGE_STATS="1").items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # otherwise vLLM's first call on a CPU compiles for 13 s
    with explained("for --engine vllm, vllm can't be imported",
                   "pip install -r requirements.txt, or --engine torch", ImportError):
        from vllm import LLM, __version__
    # The "." after both versions lets 0.32 in VERSIONS match 0.32 and 0.32.1, but not 0.320.
    tested = f"{__version__}.".startswith(tuple(f"{v}." for v in VERSIONS)) or "TORZ_ANY_VLLM" in os.environ
    require(tested, f"--engine vllm was not tested with vllm {__version__}",
            f"pip install -r requirements.txt (vllm {' or '.join(VERSIONS)}), or --engine "
            "torch")
    return LLM


def paged_kernel():
    """Returns a function like engines.torch_engine.torch_kernel that calls vLLM's FlashAttention. Returns
    None if vLLM is not installed. The torch engine uses it with a torch that has no attention over pages."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    newest = 3 if is_fa_version_supported(3) else 2

    def kernel(query, keys, values, cu_seqlens, longest, scaling, window, used, table):
        return flash_attn_varlen_func(
            query, keys, values, 1, cu_seqlens, longest, seqused_k=used, softmax_scale=scaling, causal=True,
            window_size=[window - 1, 0] if window else None, block_table=table, fa_version=newest)

    return kernel


def _repack_tied_head(model):
    """On a CPU, update vLLM's packed copy of the output layer's weights. vLLM does not update this copy
    itself if output layer and embedding are tied."""
    head = getattr(model, "lm_head", None)
    tied = head is not None and head.weight is model.model.embed_tokens.weight
    if tied and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)
