"""Names of TRL, verl and others for which nothing here has a key, and why.

Owns: one sentence for each, which ends the error about such a key or value. Does not own: names
that have a key here (`config_reference.py`). Invariant: a name that is in a sentence is one of a
key, a group or a page here.
"""

NOT_HERE = {
    "adapters are plain LoRA of linear layers": "use_rslora use_dora "
    "lora_modules_to_save modules_to_save lora_task_type lora_target_parameters",
    "a group's mean reward is the baseline, there is no critic": "critic value_model vf_coef "
    "cliprange_value gae_lambda lam gamma gae use_gae critic_warmup value_loss_coef value_head",
    "pairs of answers train nothing here": "dpo orpo kto cpo simpo dpo_beta "
    "rpo_alpha desirable_weight undesirable_weight reference_free",
    "a reward is a function, which may ask a model that is served elsewhere": "reward_model "
    "reward_model_path reward_model_name_or_path reward_processing_classes rm_path",
    "the trainer is sharded by FSDP2: trainer.num_ranks, trainer.tensor_parallel and "
    "trainer.replicate say how": "deepspeed deepspeed_config zero_stage ds3_gather_for_generation "
    "megatron mcore torchtitan accelerate fsdp fsdp2 fsdp_size pipeline_model_parallel_size "
    "pipeline_parallel_size context_parallel_size context_parallel sequence_parallel "
    "ulysses_sequence_parallel_size "
    "sequence_parallel_size expert_model_parallel_size expert_parallel_size",
    "weights that are trained are not quantised; generator.quantization quantises the generators' "
    "copy": "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant qlora qat "
    "quantization_config",
    "new weights are copied into the memory of an engine, which is done for the embedded one and "
    "vLLM": "sglang trtllm lmdeploy use_transformers_paged use_transformers_continuous_batching",
    "generators are processes of the run, no server is started": "vllm_server_host "
    "vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port",
    "no code of a checkpoint's folder runs": "trust_remote_code",
    "nothing is uploaded; `hf upload` takes the folder export of a run": "push_to_hub hub_model_id "
    "hub_token hub_strategy hub_private_repo log_completions_hub_repo",
    "llamarl starts the processes itself (cluster)": "ray ray_init ray_kwargs nproc_per_node "
    "num_processes torchrun",
    "training draws from the policy's own distribution, which the loss needs": "min_p "
    "repetition_penalty presence_penalty frequency_penalty num_beams do_sample generation_kwargs "
    "vllm_structured_outputs_regex structured_outputs structured_outputs_regex "
    "vllm_guided_decoding_regex guided_decoding_regex guided_decoding",
    "the reference is the checkpoint, and does not move": "sync_ref_model ref_model_mixup_alpha "
    "ref_model_sync_steps ref_model",
    "the KL term stands in the loss (algorithm.kl_coefficient), never in the reward": "kl_ctrl "
    "use_kl_in_reward target_kl",
    "tokens are drawn one by one, without guesses of a smaller model": "mtp speculative_algorithm "
    "num_speculative_tokens speculative_config",
    "a demonstration has a prompt and an answer": "dataset_text_field",
    "demonstrations are trained as they are": "neftune_noise_alpha",
    "models read and write text alone": "image_key video_key image_field log_multimodal "
    "freeze_vision_tower freeze_vision_model freeze_vision_projection",
    "mixtures of experts are not trained": "router_aux_loss_coef moe router_replay "
    "enable_rollout_routing_replay",
    "prompts are read before the first step, by no data loader": "dataloader_num_workers "
    "dataloader_pin_memory data_loader_seed remove_unused_columns",
    "every step is logged (docs/metrics.md)": "logging_steps logging_strategy logging_first_step "
    "log_freq log_interval",
    "`llamarl evaluate` scores a checkpoint without training": "val_only eval_only do_eval "
    "do_train do_predict",
    "how an engine computes prompts is its own affair": "enable_chunked_prefill "
    "max_num_batched_tokens",
    "a checkpoint is safetensors in the Hugging Face layout (model.checkpoint)": "load_format "
    "model_impl use_shm",
    "rollouts always go on under the next version, within staleness.max_staleness": ""
    "partial_rollout",
    "every optimizer step makes a version, which is published at once (docs/streaming.md)": ""
    "trigger_parameter_sync_step parameter_sync_step",
    "models are trained without dropout, but for that of adapters": ""
    "disable_dropout attention_dropout",
    "keys of trainer and generator say how a model is loaded, such as trainer.compute_dtype": ""
    "model_init_kwargs override_config",
    "a loop of your own is a program that calls the library (docs/library.md)": "callbacks "
    "callback",
    "a reward that returns a dict has its further numbers logged (docs/extending/task.md)": ""
    "compute_metrics log_metric log_extra reward_extra_info reward_extra_keys",
    "a reward of your own has its settings beside it, in the same file": "reward_kwargs "
    "reward_func_kwargs",
    "metrics.project names the project, and W&B's own variables hold, such as WANDB_ENTITY": ""
    "wandb_entity",
    "a loss of your own may weigh tokens (docs/extending/task.md)": "top_entropy_quantile "
    "clip_cov kl_cov",
    "logits and their softmax are float32 in any case": "cast_lm_head_to_fp32 fp32_lm_head",
    "a rollout ends where the model ends it, or at sampling.max_tokens": "ignore_eos min_tokens "
    "min_new_tokens",
    "an observation is what the environment says, whole; what does not fit ends the episode": ""
    "max_tool_response_length tool_response_truncate_side",
    "all calls of a turn are run, functions in their order and coroutines at once": ""
    "max_parallel_calls",
    "the optimizer is adamw or sgd with a state in float32 (trainer.optimizer)": "adamw_8bit "
    "paged_adamw_8bit adamw_bnb_8bit adafactor muon use_8bit_optimizer",
    "which kernels run follows from the device": "attn_implementation use_flash_attention_2 "
    "use_liger use_liger_kernel use_fused_kernels use_remove_padding cache_implementation",
}
"""Why there is no such key or value, and the names."""
FOREIGN_SECTIONS = {
    "what is in it has other names here (docs/coming-from-trl-and-verl.md)": "actor_rollout_ref "
    "actor rollout training_args grpo_config",
}
"""The same of sections, whose keys may have a counterpart."""
