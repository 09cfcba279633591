"""`eval`: evaluation by generated answers, by metrics, and by episodes in a simulator."""

from __future__ import annotations

from typing import Annotated, Literal

from shardtune.config.schema.section import Section, key
from shardtune.config.values import (
    AnswerPattern,
    Count,
    Distinct,
    EnvironmentName,
    FunctionInFile,
    HarnessOptions,
    Match,
    Number,
    Text,
)


class EvalConfig(Section):
    generate: bool = key(
        False, "Generate answers to the evaluation rows and report the share of correct ones: eval/eval_accuracy."
    )
    max_new_tokens: Count = key(256, "Maximum tokens of one generated answer.")
    temperature: Number = key(0.0, "The sampling temperature; 0: greedy decoding.", ge=0)
    answer_pattern: AnswerPattern | None = key(
        None,
        "Where the answer is in a text: group 1 of this regular expression; null: the whole text, for exact and "
        "numeric without reasoning (what follows </think>).",
    )
    match: Match = key(
        "exact", "When an answer counts as correct: exact (same text), numeric (same number), or file.py:function."
    )
    num_samples: Count | None = key(None, "How many evaluation rows are answered; null: all of them.")
    metrics: Annotated[list[FunctionInFile], Distinct] = key(
        [],
        "Your metrics, [file.py:function]: (outputs [n, …], targets [n], weights [n]) -> (sum, weight), called on one "
        "part of the predictions after another and reported as eval/<function>.",
    )
    harness: Annotated[list[Text], Distinct] = key(
        [],
        "Tasks of lm-evaluation-harness (extra `harness`), reported as eval/<task>/<metric>: names of tasks, groups or "
        "tags, or YAML files of your own.",
    )
    harness_options: HarnessOptions = key(
        {}, "Arguments of the harness's simple_evaluate and of its class of models, e.g. {limit: 100, num_fewshot: 5}."
    )
    environment: EnvironmentName | None = key(
        None,
        "The simulator in which an action model runs episodes, reported as eval/success: reach, point2d, gymnasium:ID "
        "(an environment of gymnasium), package.module:Class, or file.py:Class; null: none.",
    )
    environment_options: dict[str, object] = key(
        {},
        "Arguments of the environment's class, e.g. {max_steps: 60}; of one of gymnasium also cameras, state, "
        "instruction and success_reward, which say what its values mean.",
    )
    episodes: Count = key(50, "Episodes in each evaluation, always the same ones.")
    episode_seed: int = key(0, "The seed from which each episode's seed is derived.", ge=0, lt=2**63)
    episodes_at_once: Count = key(
        16, "Episodes that a rank runs in parallel, each in its own environment, with one batched call of the policy."
    )
    action_steps: Count | None = key(
        None,
        "How many actions of a predicted chunk are executed before the next prediction; null: all of them, or 1 with "
        "`temporal_ensembling`.",
    )
    temporal_ensembling: Number | None = key(
        None,
        "An action is the mean of all predictions for its time, weighted by exp(-w i) with this w; i counts them from "
        "the oldest (ACT: 0.01). null: the last prediction alone.",
    )
    videos: int = key(4, "How many episodes, the first ones, are saved as videos in `samples/`.", ge=0)
    video_format: Literal["gif", "mp4"] = key("gif", "The format of the videos; mp4 needs the extra `video`.")
