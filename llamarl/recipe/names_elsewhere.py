"""Names of TRL, verl and others for keys, groups, and what has no key here."""

from __future__ import annotations

ELSEWHERE = {
    "run_dir": "output_dir default_local_dir logging_dir",
    "num_steps": "max_steps total_training_steps num_train_steps train_steps",
    "num_epochs": "num_train_epochs total_epochs",
    "max_hours": "max_time max_walltime",
    "model.checkpoint": "model_name_or_path model_path model_id pretrained model_revision",
    "model.tokenizer": "tokenizer_path tokenizer_name_or_path",
    "data.prompts": "train_files train_file train_dataset dataset dataset_name dataset_config",
    "data.held_out": "val_files eval_dataset eval_file test_files",
    "data.prompt_field": "prompt_key prompt_column",
    "reward.answer_field": "answer_key ground_truth_key label_key",
    "data.chat": "apply_chat_template",
    "data.chat_template": "chat_template_path custom_chat_template",
    "data.system": "system_prompt",
    "data.shuffle": "shuffle_dataset",
    "data.completion_field": "completion_only_loss assistant_only_loss response_key",
    "data.max_prompt_tokens": "max_prompt_length max_prompt_len max_length max_seq_length",
    "data.overlong": "filter_overlong_prompts truncation too_long",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.repeat_share": "curriculum",
    "data.weights": "interleave_datasets interleave_probs probabilities",
    "reward": "reward_funcs reward_fn_key reward_fn custom_reward_function reward_function "
    "custom_reward_function.path custom_reward_function.name reward_manager reward_manager.name "
    "reward_model.reward_manager",
    "reward.functions": "gdpo_reward_keys sandbox_fusion",
    "reward.weights": "reward_weights gdpo_reward_weights",
    "environment.tools": "environment_factory tool_config_path rollout_func multi_turn "
    "multi_turn.enable agent agent_loop",
    "environment.calls": "tool_parser tool_call_parser",
    "environment.max_turns": "max_tool_calling_iterations max_assistant_turns",
    "algorithm": "loss_type adv_estimator policy_loss loss_mode importance_sampling_level lmbda",
    "algorithm.teacher": "teacher_model_name_or_path teacher_model",
    "algorithm.advantage": "scale_rewards norm_adv_by_std_in_grpo multi_objective_aggregation",
    "algorithm.normalization": "loss_agg_mode loss_reduction",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef kl_penalty_coef use_kl_loss",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty use_bias_correction_kl",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithm.filters": "filter_groups dynamic_sampling",
    "algorithm.max_drops_in_row": "max_num_gen_batches filter_groups.max_num_gen_batches",
    "algorithm.overlong_penalty_tokens": "overlong_buffer overlong_buffer_len soft_punish_cache",
    "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.mask_rollouts": "rollout_rs vllm_importance_sampling_mode",
    "algorithm.mask_above": "rollout_rs_threshold vllm_importance_sampling_clip_max",
    "algorithm.mask_below": "vllm_importance_sampling_clip_min off_policy_mask_threshold",
    "algorithm.tau_positive": "sapo_temperature_pos tau_pos",
    "algorithm.tau_negative": "sapo_temperature_neg tau_neg",
    "algorithm.rho": "importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold "
    "vllm_importance_sampling_cap rollout_is",
    "algorithm.proximal": "prox_logp_method use_decoupled_loss recompute_logprob bypass_mode",
    "algorithm.proximal_rho": "behav_imp_weight_cap behave_imp_weight_cap",
    "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low eps_clip cliprange",
    "algorithm.clip_ratio_c": "delta",
    "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "sampling.rollouts_per_prompt": "num_generations n n_samples_per_prompt group_size num_samples",
    "sampling.max_tokens": "max_completion_length max_response_length max_new_tokens",
    "sampling.stop_strings": "stop stop_words stop_token_ids",
    "generator": "use_vllm rollout_backend inference_engine actor_rollout_ref.rollout.name",
    "generator.num_ranks": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "generator.expert_parallel": "actor_rollout_ref.rollout.expert_parallel_size "
    "enable_expert_parallel",
    "generator.num_replicas": "num_engines rollout_num_engines vllm_num_engines",
    "generator.max_num_seqs": "max_running_requests per_device_eval_batch_size val_batch_size",
    "generator.max_model_len": "vllm_max_model_length max_seq_len",
    "generator.kv_cache_bytes": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "trainer.groups_per_step": "train_batch_size batch_size rollout_batch_size ppo_mini_batch_size "
    "per_device_train_batch_size generation_batch_size global_batch_size",
    "trainer.num_mini_batches": "steps_per_generation ppo_n_minibatches steps_per_batch "
    "mini_batches num_minibatches",
    "trainer.num_passes": "num_iterations ppo_epochs update_epochs num_ppo_epochs",
    "trainer.tokens_per_micro_batch": "ppo_max_token_len_per_gpu max_tokens_per_gpu "
    "ppo_micro_batch_size_per_gpu micro_batch_size gradient_accumulation_steps "
    "packing padding_free use_dynamic_bsz log_prob_micro_batch_size_per_gpu "
    "log_prob_micro_batch_size log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz",
    "trainer.parts": "require_batches",
    "trainer.compute_dtype": "bf16 mixed_precision param_dtype torch_dtype",
    "trainer.compile": "use_torch_compile torch_compile",
    "trainer.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "trainer.lr": "learning_rate actor_lr",
    "trainer.optimizer": "optim optimizer_impl",
    "trainer.betas": "adam_beta1 adam_beta2",
    "trainer.eps": "adam_epsilon adam_eps",
    "trainer.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "trainer.warmup_share": "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio",
    "trainer.schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "trainer.min_lr_share": "min_lr_ratio",
    "trainer.max_grad_norm": "grad_clip clip_grad clip_grad_norm",
    "trainer.lora.rank": "lora lora_rank lora_r lora.rank use_peft peft peft_config",
    "trainer.lora.alpha": "lora_alpha",
    "trainer.lora.dropout": "lora_dropout",
    "trainer.lora.targets": "lora_target_modules target_modules",
    "model.adapter": "lora_adapter_path adapter_path adapter_name_or_path",
    "trainer.reshard_after": "reshard_after_forward",
    "trainer.expert_parallel": "actor_rollout_ref.actor.megatron.expert_model_parallel_size "
    "expert_model_parallel_size expert_parallel_size ep_size",
    "trainer.routing_replay": "router_replay router_replay.mode router_replay_mode "
    "enable_rollout_routing_replay use_rollout_routing_replay enable_return_routed_experts",
    "trainer.router_aux_loss_coefficient": "router_aux_loss_coef moe_aux_loss_coef "
    "moe_aux_loss_coeff",
    "trainer.freeze_router": "freeze_moe_router "
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router",
    "trainer.replicate": "dp_replicate hsdp_replicate",
    "staleness.max_staleness": "max_head_offpolicyness staleness_threshold max_off_policy_steps "
    "max_async_level",
    "placement.offload": "param_offload optimizer_offload offload_policy free_cache_engine "
    "vllm_enable_sleep_mode",
    "placement.colocated": "colocate vllm_mode colocate_all hybrid_engine",
    "cluster.num_hosts": "nnodes num_nodes",
    "cluster.num_gpus_per_host": "n_gpus_per_node num_gpus_per_node gpus_per_node",
    "evaluation.every_steps": "eval_steps test_freq eval_interval val_before_train "
    "eval_strategy evaluation_strategy eval_on_start",
    "evaluation.rollouts_per_prompt": "actor_rollout_ref.rollout.val_kwargs.n num_generations_eval",
    "evaluation.temperature": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "evaluation.top_p": "actor_rollout_ref.rollout.val_kwargs.top_p",
    "evaluation.patience": "early_stopping_patience",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model",
    "checkpoint.export_every_steps": "save_contents save_hf",
    "checkpoint.every_steps": "save_steps save_freq save_interval save_strategy",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep",
    "checkpoint.resume": "resume_from_checkpoint resume_mode resume_from_path",
    "metrics.trackers": "report_to logger",
    "metrics.project": "project_name wandb_project mlflow_experiment trackio_project",
    "metrics.run_name": "experiment_name wandb_run_name",
    "metrics.tags": "wandb_tags",
    "experience.keep_rollouts": "log_completions rollout_data_dir validation_data_dir",
    "metrics.sample_rollouts": "num_completions_to_print",
}


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
    "ulysses_sequence_parallel_size sequence_parallel_size",
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
    "training draws from the policy's own distribution, which the loss needs": ""
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
