"""Titles of the benchmarks, and how to read the labels of their rows."""

SHARED_PREFIX_KERNEL = (
    "`8 x 4 at 4096` has 8 prompts of 4,096 tokens with 4 samples each. Times, rates and errors "
    "are those of vLLM's kernel, then ours. `error` is relative to float64."
)
TRAINER_STEP = (
    "`1000/100, G=8` is a prompt of 1,000 tokens with 8 responses of 100 tokens. `ours` is "
    "`coppice.train`, and `prompt KV given` is `coppice.train` with the prompt KV of the server. "
    "`kept`, `recomputed`, `injected` and `packed` are its [schedules](../concepts/training.md)."
)
SPECULATION = (
    "`ours` is sibling drafts of adaptive length, `off` no speculation, and `fixed-4` our drafts "
    "of always 4 tokens. `ngram` and `suffix` are vLLM's methods. `oracle` knows the text and "
    "sends only the correct part of each draft. `-gnu` is GNU's OpenMP instead of Intel's. "
    "`1.12 per row and step` is the mean number of tokens per sample and engine step."
)
EXPLANATIONS = {
    "adapter_cost": ("Throughput with a LoRA adapter", "A ratio below 1 is a cost."),
    "against_vllm_serve": (
        "Whole groups against `vllm serve`",
        "`8 x 8 at 512` has 8 prompts of 512 tokens with 8 samples each. `native` is "
        "`/v1/rollouts` and `openai` this server's `/v1/completions`; `vllm serve` is the same "
        "route of vLLM's server as it starts by default. `with our threads` has one thread per "
        "processor, as this server. Processor time is that of all processes of a server.",
    ),
    "cross_context": (
        "Reused KV of prompt spans: time to first token, and error",
        "`1128 tokens` is the length of a prompt. `prefilled` is vLLM's prefix caching. `spliced` "
        "reuses the KV of spans at other positions; some first tokens of a span are recomputed. "
        "`predicted` predicts KV from earlier prompts of the same agent; `predicted at 0.3` has "
        "`kv_reuse.max_entropy` 0.3. "
        "`prefilled / spliced` above 1 is a gain.",
    ),
    "data_parallel": (
        "Several engines in one service",
        "`8 x 8 samples` are 8 groups of 8. Two engines run a single group on one of them.",
    ),
    "drain": (
        "Time of a drain that hands over running samples",
        "Without it (`cluster.handoff_seconds: 0`) the replica runs the samples to their end.",
    ),
    "draft_store": ("Time of the draft store", "Sibling drafts are read from this store."),
    "drafter_recovery": ("Acceptance of the drafter after a policy update", ""),
    "drafter_replay": (
        "Tokens per forward pass of draft methods, on recorded rollouts",
        "`T 1.0` is the temperature. `3 finished siblings` are samples with 3 finished siblings in "
        "their group. `ours` is sibling drafts, and `Arctic` the suffix decoding of "
        "arctic-inference. `Seer, Table 2` is what the Seer paper publishes for other models. "
        "`linear cost model` and `measured costs` are simulated times.",
    ),
    "drafter_training_cost": ("Cost of training the drafter in the background", ""),
    "host_path": (
        "Tokens per second around a model that takes no time",
        "`256 x 1` has 256 prompts with a sample each. The `null executor` returns token ids and "
        "logprobs at once; `one layer` is computed. `packed`, `JSON` and `streamed` are formats of "
        "`/v1/rollouts`. `completions` is `/v1/completions` and `generate` vLLM's route of token "
        "ids, `/inference/v1/generate`. An engine `alone` is called in its process, without HTTP. "
        "Processor times are those of EngineCore's process and of all others of a server. "
        "`deliveries` are the pieces of a stream in which tokens arrive.",
    ),
    "kv_across_updates": (
        "KV kept across weights updates",
        "`recompute all` has no `keep_kv`; `keep all` has no limit. The KL divergence is that "
        "of the distribution that was sampled from, from the one over exact KV, over the whole "
        "vocabulary; `+-` is one standard error. The importance ratio is the probability over "
        "exact KV, divided by the returned one: its mean is 1 if the returned one is right. "
        "`expected` is the mean over the whole vocabulary instead of the sampled tokens.",
    ),
    "kv_export_cost": (
        "Cost of exporting prompt KV",
        "`prompt KV on / off` compares engines of which no export is requested.",
    ),
    "kv_transport": (
        "Bandwidth of reading prompt KV",
        "`break-even` divides the bandwidth by the rate at which a prefill would produce the same "
        "bytes. Above 1, reading is faster than prefilling again.",
    ),
    "length_bias": (
        "Length bias of finish policies",
        "`first, 4 of 8`: the group finishes when the policy `first` has its 4 of 8 samples.",
    ),
    "loop_latency": ("Latency of the service under the largest requests", ""),
    "sampling_controls": (
        "Sampling controls",
        "`with it / without` compares requests with and without the control; below 1 is a cost. "
        "vLLM's server has the same control.",
    ),
    "service_overhead": (
        "Cost of HTTP",
        "`direct` calls vLLM's AsyncLLM in the service's process.",
    ),
    "sessions": (
        "Tokens and times of agent sessions",
        "`linear`, `branches`, `compaction` and `sub-agents` are scripted conversations, which "
        "share no prefix with each other. The recorder is a proxy in front of vLLM's server that "
        "keeps one row per turn. `unique` tokens are those of the trees. `evicted`: other callers "
        "filled the KV cache during the pause. `retained`: they did so on a server that retains "
        "the KV of paused sessions. `kept`: there were no other callers. `chat route` is "
        "`/v1/chat/completions`.",
    ),
    "shared_prefix_decode": (
        "Decode steps with shared-prefix attention",
        "`8 groups of 8, prefix 4096` has 8 prompts of 4,096 tokens with 8 samples each. The times "
        "are vLLM's, then ours. `without attention` is the gain if attention took no time. It is "
        "more than the share of the `attention layers`, because the other layers are faster in a "
        "step without attention.",
    ),
    "shared_prefix_kernel": (
        "Attention kernel for shared prefixes, alone, with AVX-512",
        SHARED_PREFIX_KERNEL,
    ),
    "shared_prefix_kernel_avx2": (
        "Attention kernel for shared prefixes, alone, with AVX2",
        SHARED_PREFIX_KERNEL,
    ),
    "speculation_100m_0_6": ("Speculation: 100M parameters, temperature 0.6", SPECULATION),
    "speculation_100m_1": ("Speculation: 100M parameters, temperature 1.0", SPECULATION),
    "speculation_100m_amx_1": (
        "Speculation: 100M parameters, temperature 1.0, a processor with AMX",
        SPECULATION + " `disabled` is the engine of `ours` without drafts.",
    ),
    "speculation_25m_0_6": ("Speculation: 25M parameters, temperature 0.6", SPECULATION),
    "speculation_25m_1": ("Speculation: 25M parameters, temperature 1.0", SPECULATION),
    "speculation_guard": ("Speculation where no draft can be predicted", SPECULATION),
    "straggler_drafts": (
        "Gain of sibling drafts for whole batches and their last samples",
        "Times are simulated. With `known prompts` the drafts are looked up in the responses of "
        "earlier epochs too. The speed of steps of at most 4 samples is that of each sample.",
    ),
    "stragglers": ("Groups that do not wait for their longest samples", ""),
    "support_replay": (
        "Importance ratios of constrained samples",
        "`0.969 (28.3% out of band) -> 1.000 (0.0% out of band)` is the mean ratio, and the share "
        "of tokens outside of the band, without and with supports. The size is that of the encoded "
        "supports. `across an update` activates other weights while the samples run. `server` and "
        "`trainer` are times without and with supports, at top_p 0.8 and with 64 ids per token.",
    ),
    "trainer_step": ("Policy updates, on an idle machine", TRAINER_STEP),
    "trainer_step_shared": ("Policy updates, on a machine with other work", TRAINER_STEP),
    "trees": (
        "Trees against separate samples",
        "`flat` is 16 separate samples. Leaves of a tree share parts; `effective independent "
        "leaves` is the number of separate samples that they are worth.",
    ),
    "vllm_bench_serve": (
        "`vllm bench serve` against this server and vLLM's",
        "Streams over the OpenAI routes. `ttft` is the time to the first token, `itl` the time "
        "between tokens.",
    ),
    "weight_delta": ("Size of a weights delta", ""),
    "weight_publish": (
        "Publication of weights",
        "The time of a row ends with the first token of the new version. `upload` ends when the "
        "version is staged. `shared directory` "
        "is a file that the safetensors library writes and the server reads. `copy` and `socket` "
        "are limits of the machine for as many bytes.",
    ),
}
