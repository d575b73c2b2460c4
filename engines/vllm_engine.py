"""An engine that runs vLLM inside each training rank.

Awake, the engine uses --engine_share of the GPU's memory. Asleep (vLLM's sleep level 2), it has no weights
and no KV cache. `load` allocates the KV cache last, to keep the peak memory low.

`generate` reads the outputs of vLLM's core, because vLLM's own output processor takes twice as long for 256
responses. So torz itself looks for stop strings. It ends a response in vLLM with an abort.

Only tested versions of vLLM are accepted. Other versions may not restore the whole engine after sleep: vLLM
0.26 loses a part of its state."""

import os
import warnings
from array import array
from functools import partial

import numpy as np
import torch

import dist
from engine import Engine
from guard.messages import explained, require
from model import load_config

VERSIONS = ("0.32", "0.33")  # the tested versions, by their starts


class VLLMEngine(Engine):
    """Runs vLLM's class LLM in the process of each training rank. With --tp N, each group of N neighbouring
    ranks is one engine."""

    needs_selfcheck = True

    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        # vLLM's request id -> (key, tokens, log-probs). In an array a token takes 4 bytes, in a list 32.
        self.running = {}
        with dist.phase("start/import_vllm"):
            LLM = _import_vllm()
            _import_model(self.config.architectures)
        if self.device.type == "cuda":
            options = dict(
                gpu_memory_utilization=cfg.engine_share,
                enable_sleep_mode=True,
                compilation_config=_graphs(cfg.max_num_seqs, cfg.samples_per_step // self.engines),
            )
        else:
            # On a CPU, compilation would take minutes, and chunked prefill raises an error for requests that
            # have a seed (vLLM 0.32).
            options = dict(
                kv_cache_memory_bytes=2**28,
                enforce_eager=True,
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(4096, cfg.engine_len, cfg.max_num_seqs),
            )
        if self.config.model_type == "qwen3_5_text":
            # load_config returns the config of only the language model if the model also reads images.
            options["hf_overrides"] = lambda config: load_config(path)
            # vLLM's default on Hopper is FlashInfer's kernel, which is compiled in the first run.
            options["additional_config"] = {"gdn_prefill_backend": "triton"}
            # On a CPU it is off: caching a recurrent state needs chunked prefill, which is off above.
            options["enable_prefix_caching"] = self.device.type == "cuda"
        with (
            dist.phase("start/engine"),
            self.engine_errors("to start"),
            warnings.catch_warnings(action="ignore"),
        ):
            self.llm = LLM(
                model=path,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=cfg.engine_len,
                max_num_seqs=cfg.max_num_seqs,
                seed=self.rank // cfg.tp,  # number of the engine: the same on all its ranks
                tensor_parallel_size=cfg.tp,
                distributed_executor_backend="external_launcher",
                logprobs_mode="processed_logprobs",  # after temperature and top-p
                load_format="dummy",  # `load` brings the weights
                use_tqdm_on_load=False,
                disable_log_stats=True,
                **{"enable_prefix_caching": True, **options},
            )
        self._sleep()

    def load(self, weights):
        self.llm.wake_up(tags=["weights"])
        self.ledger.mark("weights")
        # For some models, vLLM copies the embedding and the output layer only after it has received the last
        # weight. FSDP has then freed both tensors, so vLLM gets clones.
        copied = "embed_tokens.weight", "lm_head.weight"  # ends of names
        stream = (
            (name, tensor.clone() if name.endswith(copied) else tensor) for name, tensor in weights
        )
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        # On a CPU, vLLM does not update its packed copy of a tied output layer.
        self.llm.apply_model(_repack_tied_head)
        torch.cuda.empty_cache()
        self.ledger.mark("sync")
        self.llm.wake_up(tags=["kv_cache"])
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not reset its prefix cache")
        assert not self.llm.llm_engine.is_sleeping(), "vLLM did not wake"

    def unload(self):
        """Abort unfinished requests, then sleep. After a failed wake-up, vLLM's is_sleeping() is still true,
        so `sleep` is not called."""
        self._abort()
        if not self.llm.llm_engine.is_sleeping():
            self.llm.sleep(level=2)
            assert self.llm.llm_engine.is_sleeping(), "vLLM did not fall asleep"

    def _abort(self):
        """Abort all requests in `running`, if there are any."""
        self.llm.llm_engine.engine_core.abort_requests(list(self.running))
        self.running.clear()

    def generate(self, requests, limits, temperature, seed, version, top_p=1.0):
        """All ranks of an engine must give vLLM the same requests in the same order. So each rank queues the
        requests of all ranks of its engine, but yields only the responses to the rank's own `requests`."""
        self.check(version)
        self._abort()  # an earlier call may not have been read to its end
        queued = {}  # k -> (prompt tokens, limit), of all ranks of this engine
        for of_rank in self.gather({k: (requests[k], limits[k]) for k in requests}):
            queued |= of_rank
        self._enqueue(queued, temperature, seed, top_p)
        while self.running and self.goes_on():
            with self.engine_errors(f"to sample with the weights of step {version}"):
                ended = self._step()
            for k, ids, logp, stopped in ended:
                if k in requests:
                    yield self.sample(k, requests[k], ids, logp, stopped)

    def _enqueue(self, queued, temperature, seed, top_p):
        """Queue requests, longest prompts first, and add their responses to `running`.

        queued: (prompt_id, sample_id) -> (prompt tokens, largest number of response tokens)"""
        from vllm import SamplingParams

        # logprobs=0: vLLM returns only the log-prob of the sampled token
        common = dict(temperature=temperature, top_p=top_p, logprobs=0, detokenize=False)
        order = sorted(queued, key=lambda k: (-len(queued[k][0]), k))
        prompts, params = [], []
        for k in order:
            tokens, limit = queued[k]
            sequence = np.random.SeedSequence((*seed, *k))
            number = int(sequence.generate_state(1)[0])  # the response's seed, below 2^32
            prompts.append({"prompt_token_ids": list(tokens)})
            params.append(
                SamplingParams(
                    max_tokens=limit, seed=number, stop_token_ids=sorted(self.eos), **common
                )
            )
        ids = self.llm.enqueue(prompts, params, use_tqdm=False)  # vLLM's request ids
        for i, k in zip(ids, order, strict=True):
            self.running[i] = k, array("i"), array("f")
        engine = self.llm.llm_engine
        # Remove the requests from vLLM's output processor. Its core keeps them.
        engine.output_processor.abort_requests(ids, internal=True)
        assert not engine.has_unfinished_requests(), "vLLM's output processor kept requests"

    def _step(self):
        """Runs a step of vLLM. Returns the responses that ended, each as (key, tokens, log-probs, whether EOS
        or a stop string ended it). The asserts check what this method relies on in vLLM's core."""
        core = self.llm.llm_engine.engine_core
        outputs = core.get_output().outputs  # each output has one new token of a request
        assert outputs or core.engine_core.scheduler.has_requests(), "vLLM lost requests"
        ended = {}  # request id -> response
        for output in outputs:
            # A request that is not in `running` has ended at a stop string. vLLM may sample more tokens of it
            # before it gets the abort.
            if output.request_id not in self.running:
                continue
            key, ids, logp = self.running[output.request_id]
            reason = str(output.finish_reason)  # "stop": EOS; "length": the limit; "None": goes on
            logprobs = output.new_logprobs
            assert reason in ("None", "stop", "length"), f"vLLM ended a response: {reason}"
            # Whether one token came, and the log-prob is that of this token
            is_of_token = logprobs.logprob_token_ids.tolist() == [output.new_token_ids]
            assert is_of_token, "vLLM's log-prob is not that of one sampled token"
            ids += array("i", output.new_token_ids)
            logp.append(logprobs.logprobs.item())
            stopped = reason == "stop" or self.at_stop(ids)
            if stopped or reason == "length":
                ended[output.request_id] = key, ids, logp, stopped
                del self.running[output.request_id]
        core.abort_requests(list(ended))  # vLLM does not know that some ended at a stop string
        return ended.values()


def _graphs(slots, samples):
    """Returns vLLM's settings of compilation and CUDA graphs. slots: largest number of responses that
    an engine decodes at the same time. samples: number of responses that an engine samples in a step.

    Graphs are only for decoding. vLLM's default also captures graphs of steps that read prompts, and three
    times as many batch sizes. A batch runs in the next larger graph. Up to some 200 responses, a larger graph
    is as fast, because reading the weights takes longer than the matrix products.

    Compilation takes half of vLLM's start, and makes steps that read prompts faster. If all samples of a step
    have slots, these steps are few, and vLLM does not compile (mode 0)."""
    sizes = (1, 2, 4, 8, 16, *range(32, slots + 32, 32))
    return {
        "mode": 0 if samples <= slots else 3,  # 0: no compilation, 3: vLLM's compiler
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted({min(size, slots) for size in sizes}),
    }


def _import_vllm():
    """Returns vLLM's class LLM. Raises UserError if vLLM is missing, or if its version is not in VERSIONS and
    the environment variable TORZ_ANY_VLLM is not set."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        # Otherwise vLLM's first call on a CPU compiles for 13 s.
        torch._dynamo.config.disable = True
    with explained(
        "for --engine vllm, vllm can't be imported",
        "pip install -r requirements.txt, or --engine torch",
        ImportError,
    ):
        from vllm import LLM, SamplingParams, __version__
    require(
        __version__.startswith(VERSIONS) or "TORZ_ANY_VLLM" in os.environ,
        f"--engine vllm was not tested with vllm {__version__}",
        f"pip install -r requirements.txt (vllm {' or '.join(VERSIONS)}), or --engine torch",
    )
    # When vLLM starts, it calls for_sampler_warmup, and compiles the sampling kernels for the parameters that
    # it returns. vLLM's own function asks for all kernels, which takes 30 CPU seconds.
    SamplingParams.for_sampler_warmup = partial(SamplingParams, temperature=0.7, seed=0, logprobs=0)
    return LLM


def _import_model(architectures):
    """Import vLLM's model class here. Otherwise, if vLLM's cache is empty, vLLM looks at the class in a new
    process, which must import all of vLLM again."""
    from vllm import ModelRegistry

    for name in architectures or ():
        if name in ModelRegistry.models:
            with explained(
                f"for --engine vllm, vllm's {name} can't be imported",
                "the package that it names, built for the same torch",
                ImportError,
            ):
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def paged_kernel():
    """Returns a function like engines.torch_engine.torch_kernel that calls vLLM's FlashAttention. The torch
    engine uses it with a torch that has no attention over pages. Raises UserError if vLLM is missing."""
    with explained(
        f"--engine torch on a GPU: torch {torch.__version__} has no attention over pages",
        "torch 2.13 or newer, or vllm, whose kernel is then used",
        ImportError,
    ):
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            is_fa_version_supported,
        )
    version = 3 if is_fa_version_supported(3) else 2  # FlashAttention 3 runs on H100 and H200 only

    def kernel(query, keys, values, cu_seqlens, longest, scaling, window, **pages):
        limits = [window - 1, 0] if window else None  # tokens before and after; None: no limit
        return flash_attn_varlen_func(
            query,
            keys,
            values,
            1,  # queries of each response
            cu_seqlens,  # of the queries
            longest,  # largest number of keys of a response
            softmax_scale=scaling,
            causal=True,
            window_size=limits,
            fa_version=version,
            **pages,
        )

    return kernel


def _repack_tied_head(model):
    """On a CPU, update vLLM's packed copy of the output layer's weights. vLLM does not update this copy
    itself if output layer and embedding are tied."""
    head = getattr(model, "lm_head", None)
    tied = head is not None and head.weight is model.model.embed_tokens.weight
    if tied and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)
