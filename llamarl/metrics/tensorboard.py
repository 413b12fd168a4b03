"""The tracker `tensorboard`: event files in the run's folder, by tensorboard's own writer.

The writers of torch and tensorboardX load torch into the controller (2.2 s at the start instead of
0.2 s), and a flush of tensorboardX returns before its queue is written. When `log` returns, its
values are on disk; every tag of a run has a section and a description."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
from tensorboard.plugins.histogram.metadata import create_summary_metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.hparams.summary_v2 import Metric, hparams_pb
from tensorboard.plugins.scalar.metadata import create_summary_metadata as scalar_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from llamarl.metrics.step_metrics import Histograms, Scalars, Texts

MOST_BUCKETS = 64
# The tags whose last values the table of hyper-parameters shows for each run.
JUDGED_BY = ["evaluation/accuracy", "evaluation/reward", "accuracy/train", "reward/mean"]
JUDGED_BY += ["tokens/per_s"]
SECTIONS = {  # first words of tags by section; TensorBoard sorts by name, hence the numbers
    "1_outcome": ("reward", "accuracy", "evaluation", "reward_parts", "reward_extra")
    + ("loss", "perplexity"),
    "2_rollouts": ("reward_failures", "rollouts", "demonstrations", "groups", "dropped")
    + ("dropped_rollouts", "columns", "length", "prompts")
    + ("source_groups", "source_dropped_share", "source_reward", "source_length"),
    "3_training": ("policy", "trained", "trainer"),
    "3_episodes": ("episode", "tool_calls", "tool_s", "tool_errors"),
    "4_pace": ("tokens", "time", "wait", "staleness", "parts", "publish"),
    "5_checks": ("logprob_check",),
}
SHARES = ("accuracy", "evaluation")  # first words of tags that may have an interval
OTHERS = "6_others"
INTERVALS = "7_intervals"
ENDS = ("_low", "_high")  # of a share's interval, which summary and live display show beside it

DESCRIPTIONS = {  # by tag, or by its first word and a slash
    "reward/mean": "Mean reward of the rollouts finished in the step, trained and dropped ones.",
    "reward/std": "Standard deviation of the rewards of the rollouts finished in the step.",
    "reward/values": "Number of rollouts by reward.",
    "accuracy/train": "Share of the rollouts finished in the step to which the first reward "
    "function gave reward.correct_at or more.",
    "accuracy/train_low": "Lower end of the 95 % interval of accuracy/train, whose rollouts of one "
    "prompt are alike.",
    "accuracy/train_high": "Upper end of that interval.",
    "evaluation/accuracy": "Share of held-out completions to which the first reward function gave "
    "reward.correct_at or more.",
    "evaluation/accuracy_low": "Lower end of the 95 % interval of evaluation/accuracy: Wilson's; "
    "with several rollouts per prompt, of as many independent ones as would say as much.",
    "evaluation/accuracy_high": "Upper end of that interval.",
    "evaluation/": "pass_at_k: share of prompts of which one of k rollouts is correct; "
    "maj_at_k: of which the answer that most of k rollouts give has; _low and _high: their "
    "interval. After the name of a held-out set, any of these for that set.",
    "evaluation/prompts": "Held-out prompts of the evaluation: always all of them.",
    "evaluation/reward": "Mean reward on held-out prompts.",
    "evaluation/length": "Mean tokens of a held-out completion.",
    "evaluation/truncated_share": "Share of held-out completions cut at evaluation.max_tokens.",
    "evaluation/reward_extra/": "Mean of a further number of this name in the dict that a reward "
    "of task.py returned for held-out completions.",
    "evaluation/failed": "Held-out completions whose reward failed: wrong, with reward 0.",
    "loss/train": "llamarl sft: mean loss per token of the answers in the step.",
    "loss/held_out": "llamarl sft: the same of the held-out demonstrations.",
    "perplexity/": "llamarl sft: exp of the loss of that name.",
    "reward_parts/": "Mean of what this reward function gave, before its weight is applied.",
    "reward_extra/": "Mean of a further number of this name in the dict that a reward of task.py "
    "returned.",
    "reward_failures/": "Rollouts whose reward failed: its code raised, took too long (hung) or "
    "returned no finite number (invalid).",
    "rollouts": "Sample completions of the step as text: in turn the best and worst of a group.",
    "demonstrations/trained": "llamarl sft: demonstrations trained in the step.",
    "rollouts/trained": "Rollouts trained in the step.",
    "groups/trained": "Groups (the rollouts of one prompt) trained in the step.",
    "groups/masked": "Trained groups with tokens that were too old (see tokens/masked).",
    "dropped/groups": "Groups that the group filter dropped since the last step.",
    "dropped/solved": "Dropped groups whose rollouts are all correct: the prompt is too easy, "
    "or reward.correct_at too low for the scale of the rewards.",
    "dropped/equal_rewards": "Dropped groups whose rewards are all equal: they give no gradient.",
    "dropped/failed_reward": "Dropped groups with a rollout whose reward failed.",
    "dropped/": "Groups dropped for this reason since the last step.",
    "dropped_rollouts/": "Rollouts that a stage of the recipe's own dropped for this reason since "
    "the last step; `<stage>_failed`: its code failed on them; `environment_raised`, `_hung` and "
    "`_invalid`: their episodes failed.",
    "columns/": "Mean of this column, which a stage of the recipe's own wrote.",
    "prompts/epoch": "Epochs of the prompts walked so far; of weighted sources on average.",
    "prompts/skipped": "Prompts passed over since the last step, as data.repeat_share says.",
    "prompts/without_signal": "Prompts whose latest group gave no signal, of all.",
    "source_groups/": "Groups of this source of prompts finished in the step.",
    "source_dropped_share/": "Share of these groups that was dropped.",
    "source_reward/": "Mean reward of the rollouts of this source finished in the step.",
    "source_length/": "Mean tokens of these completions.",
    "length/tokens": "Tokens of the completions finished in the step.",
    "length/truncated_share": "Share of completions, or conversations, cut at sampling.max_tokens.",
    "length/mean": "Mean tokens of a completion, or of a conversation of an agent.",
    "length/p50": "Tokens that half of the completions do not exceed.",
    "length/p90": "Tokens that nine of ten completions do not exceed.",
    "length/max": "Tokens of the longest completion.",
    "episode/turns": "Mean turns of the model in an episode.",
    "episode/conversations": "Mean conversations that an agent opened in an episode.",
    "episode/limited_turns": "Episodes of agents that environment.max_turns ended.",
    "episode/limited_conversations": "Those that environment.max_conversations ended.",
    "episode/limited_tokens": "Those that environment.max_episode_tokens ended.",
    "episode/environment_s": "Seconds that an episode waited for its environment, on average.",
    "episode/observed_share": "Share of response tokens that are observations, without weight.",
    "episode/kept_share": "Share of turns whose replica still had the keys and values of the turns "
    "before; for the others they were computed again.",
    "episode/malformed_calls": "Calls that did not parse, which the model was told.",
    "episode/overlong_observations": "Episodes that an observation ended that did not fit.",
    "episode/restarts": "Times that an episode began again: its environment or replica was lost.",
    "tool_calls/": "Calls of this tool in the episodes finished in the step.",
    "tool_s/": "Mean seconds of a call of this tool.",
    "tool_errors/": "Calls of this tool that raised, or had wrong arguments.",
    "policy/entropy": "Entropy per token of what was written, in nats: the mean of -log mu over "
    "all of it, trained or not.",
    "policy/grad_norm": "Norm of the gradient before clipping.",
    "trained/entropy": "Mean entropy of the trainer's next-token distribution over trained tokens, "
    "in nats.",
    "trained/ratio_mean": "Mean of pi/mu over trained tokens, trainer over generator: 1 where they "
    "agree.",
    "trained/ratio_max": "Largest pi/mu of a trained token.",
    "trained/clipped_share": "Share of trained tokens whose ratio was clipped.",
    "experts/busiest_share": "Share of the choices of a layer's routers that its busiest expert "
    "has; mean over the layers with experts.",
    "experts/router_entropy": "Entropy of the routers' probabilities per token in nats; mean over "
    "the layers with experts.",
    "experts/moved_share": "Share of the generator's recorded choices of experts that the "
    "trainer's routers would not have made; 0 without routing replay.",
    "trained/kl_generator": "KL divergence between generator and trainer, per trained token, in "
    "nats.",
    "trained/kl_reference": "The KL penalty's estimate per trained token against the frozen model, "
    "in nats.",
    "trainer/loss": "Loss of the step: a sum over tokens, divided as algorithm.normalization says.",
    "trainer/lr": "Learning rate of the step.",
    "trainer/": "A number that the trainer reported at the optimizer step.",
    "tokens/per_s": "Response tokens trained per second of the step.",
    "tokens/trained": "Response tokens trained in the step.",
    "tokens/context": "llamarl sft: tokens of the step's demonstrations that are only context.",
    "tokens/held_out": "llamarl sft: tokens of held-out answers, which the loss is the mean over.",
    "tokens/masked": "Tokens that the model wrote of weight 0 in the loss: too old, or of a "
    "rollout that is truncated or has drifted.",
    "tokens/drifted": "Of these, tokens of rollouts that algorithm.mask_rollouts masks.",
    "time/step_s": "Seconds from the end of the step before to the end of this one.",
    "time/publish_s": "Seconds of the latest publish, until the generators decoded its version.",
    "time/": "Seconds that this took.",
    "wait/": "Seconds that a process of this executor waited during the step, on average.",
    "staleness/mean": "Mean age of trained tokens, in versions.",
    "staleness/max": "Largest age of a trained token, at most staleness.max_staleness.",
    "staleness/tokens": "Trained tokens by age, in versions.",
    "staleness/mixed_version_share": "Share of trained rollouts that several versions wrote.",
    "publish/exposed_s": "Seconds per publish that are not hidden behind work: the sum of "
    "publish/trainer_s, publish/commit_s and publish/starved_s. All of a publish's seconds: "
    "time/publish_s.",
    "publish/trainer_s": "Seconds per publish that the trainer kept its weights for it before its "
    "next step, or its next batch had to wait for it.",
    "publish/commit_s": "Seconds per publish that a replica stood still to commit, on average.",
    "publish/starved_s": "Seconds per publish that a replica had nothing to decode while the "
    "version was on its way, on average.",
    "parts/number": "Parts in which the step was trained.",
    "parts/least_tokens": "Tokens that must be ready before a part starts, as measured by then.",
    "logprob_check/rows": "Short rollouts compared between generators and trainer in the step.",
    "logprob_check/difference": "Largest difference of log-probs, trainer from generator, in nats.",
    "logprob_check/tolerance": "Largest difference of log-probs that the check allows, in nats.",
}


def chart_tag(tag: str) -> str:
    """Return the tag of a chart: `reward/mean` -> `1_outcome/reward/mean`."""
    word = tag.partition("/")[0]
    section = next((name for name, words in SECTIONS.items() if word in words), OTHERS)
    is_end = word in SHARES and tag.endswith(ENDS)
    return f"{INTERVALS if is_end else section}/{tag}"


def description(tag: str) -> str:
    """Return what the values of `tag` mean; "" for a tag that is not of this package."""
    folders = (tag.rpartition("/")[0] + "/", tag.partition("/")[0] + "/")
    return next((DESCRIPTIONS[each] for each in (tag, *folders) if each in DESCRIPTIONS), "")


class TensorBoardTracker:
    """Writes one event file in `run_dir/tensorboard`. TensorBoard forgets what an earlier session
    of the run logged from `first_step` on."""

    def __init__(self, run_dir: Path, config: Mapping[str, object], first_step: int) -> None:
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._described: set[str] = set()
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        kinds = bool | int | float | str
        values = {key: v if isinstance(v, kinds) else str(v) for key, v in config.items()}
        self._write(Event(summary=_experiment(values)))
        self._write(Event(summary=hparams_pb(values)))

    def log(self, step: int, scalars: Scalars, histograms: Histograms, texts: Texts) -> None:
        """Write one event with everything the step brought."""
        summary = Summary()
        for tag, value in scalars.items():
            scalar = summary.value.add(tag=chart_tag(tag), simple_value=value)
            # TensorBoard takes a tag's description from its first value: its fast loader only from
            # one that has its plugin and class of data.
            if tag not in self._described:
                self._described.add(tag)
                scalar.metadata.CopyFrom(scalar_metadata(None, description(tag)))
                scalar.metadata.data_class = DATA_CLASS_SCALAR
        summary.value.extend(_histogram(tag, n) for tag, n in histograms.items() if n)
        for tag, text in texts.items():
            summary.MergeFrom(text_pb(chart_tag(tag), text, description(tag)))
        self._write(Event(step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
        self._writer.flush()


def _histogram(tag: str, counts: Mapping[float, int]) -> Summary.Value:
    """Return a histogram with equal buckets around the values, from the smallest to the largest."""
    values = np.array(sorted(counts), dtype=np.float64)
    gap = float(np.diff(values).min()) if len(values) > 1 else max(1.0, abs(values[0]) / 2**20)
    reach = float(values[-1] - values[0])
    width = max(gap, reach / MOST_BUCKETS)
    num_buckets, first = round(reach / width) + 1, values[0] - width / 2
    ends = first, max(first + num_buckets * width, values[-1])
    weights = [counts[value] for value in values.tolist()]
    amounts, edges = np.histogram(values, num_buckets, ends, weights=weights)
    tensor = make_tensor_proto(np.stack([edges[:-1], edges[1:], amounts], axis=1))
    about = histogram_metadata(None, description(tag))
    return Summary.Value(tag=chart_tag(tag), metadata=about, tensor=tensor)


def _experiment(values: Mapping[str, bool | float | str]) -> Summary:
    """Return the columns of the HPARAMS tab with their types; metrics are existing charts."""
    experiment = api_pb2.Experiment()
    for key, value in sorted(values.items()):
        kind = {bool: "BOOL", str: "STRING"}.get(type(value), "FLOAT64")
        experiment.hparam_infos.add(name=key, type=api_pb2.DataType.Value(f"DATA_TYPE_{kind}"))
    metrics = (Metric(chart_tag(tag), display_name=tag) for tag in JUDGED_BY)
    experiment.metric_infos.extend(metric.as_proto() for metric in metrics)
    about = metadata.create_summary_metadata(HParamsPluginData(experiment=experiment))
    value = Summary.Value(tag=metadata.EXPERIMENT_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
