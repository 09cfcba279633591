"""`data`: the rows and how they become tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardtune.config.schema.augmentation import AugmentationConfig
from shardtune.config.schema.section import Section, key, section
from shardtune.config.values import Allowed, Count, Distinct, FunctionInFile, Number, Text, one_or_more


class DataEntry(Section):
    """One source among several in `data.train_data_paths` or `data.eval_data_paths`."""

    path: Text = Field(
        description="A file, glob, directory, URL of a remote one (s3://…), or Hub name, with its revision as "
        "owner/name@revision."
    )
    name: Text | None = key(
        None,
        "The source's name in logs and counts; for a Hub data set also its configuration; null: derived from the path.",
    )
    weight: Number = key(1.0, "An epoch has round(weight x rows) rows of this source.", gt=0)
    max_samples: Count | None = key(None, "Only this many rows, the first ones; null: all of them.")
    columns: dict[str, str] = key({}, "As `data.columns`, for this source; its entries take precedence.")
    format: (
        Literal["tokens", "messages", "sharegpt", "instruction", "prompt_completion", "question_answer", "text"] | None
    ) = key(None, "The row format; null: detected for each row.")
    split: Text | None = key(
        None, "The split of a Hub data set; null: train for training rows, validation or test for evaluation rows."
    )


SOURCES = "a path or Hub name, an entry {path, name, weight, …}, or a list of these"
Sources = Annotated[str | DataEntry | list[str | DataEntry], one_or_more(DataEntry, named=False), Allowed(SOURCES)]
NamedSources = Annotated[
    str | DataEntry | list[str | DataEntry] | dict[str, str | DataEntry | list[str | DataEntry]],
    one_or_more(DataEntry, named=True),
    Allowed(f"{SOURCES}, or a mapping of set name to any of these"),
]


ThinkingChoice = Annotated[
    Literal["keep", "last", "template", "strip"],
    BeforeValidator(lambda value: "strip" if value == "drop" else value),  # its former name
]
NO_LIMIT = "null: no limit."


class AuditConfig(Section):
    """Limits beyond which training is refused; shares are from 0 to 1."""

    max_dropped: Number | None = key(
        None,
        "Rows dropped as too long, without a target or not usable, as a share of the rows read; not those that "
        f"`transform` drops. {NO_LIMIT}",
        ge=0,
        le=1,
    )
    max_without_target: Number | None = key(
        None, f"Rows dropped because nothing of them is trained, as a share of the rows read; {NO_LIMIT}", ge=0, le=1
    )
    max_truncated: Number | None = key(
        None, f"Rows cut at `max_length`, as a share of the rows kept; {NO_LIMIT}", ge=0, le=1
    )
    max_near_empty: Number | None = key(
        None,
        f"Rows with nothing but space and punctuation as targets, as a share of the rows kept; {NO_LIMIT}",
        ge=0,
        le=1,
    )
    max_untrained_ends: Number | None = key(
        None,
        f"Rows with an answer whose end of turn is not trained, as a share of the rows kept; {NO_LIMIT}",
        ge=0,
        le=1,
    )
    max_duplicates: Number | None = key(
        None, f"Rows that repeat an earlier one exactly, as a share of the rows kept; {NO_LIMIT}", ge=0, le=1
    )
    max_near_duplicates: Number | None = key(
        None, f"Rows that nearly repeat an earlier one, as a share of the rows kept; {NO_LIMIT}", ge=0, le=1
    )
    max_contamination: Number | None = key(
        None,
        f"Rows of an evaluation set that training has too, exactly or nearly, as a share of the set; {NO_LIMIT}",
        ge=0,
        le=1,
    )
    min_trained_share: Number | None = key(None, f"Targets as a share of the tokens; {NO_LIMIT}", ge=0, le=1)


class DataConfig(Section):
    train_data_paths: Sources | None = key(
        None,
        "The training rows: files, globs, directories and Hub names, or entries {path, name, weight, max_samples, "
        "columns, format, split}; required unless rows are passed as objects.",
    )
    eval_data_paths: NamedSources | None = key(
        None, "The evaluation rows, likewise, or named sets {math: a.jsonl, chat: b.jsonl} -> eval/math/loss, …"
    )
    eval_split: Number = key(
        0.0, "The share of the training rows that is held out for evaluation, chosen by row hash.", ge=0, lt=1
    )
    columns: dict[str, str] = key(
        {}, "Your names for the columns of a row format, e.g. {question: problem, answer: solution}."
    )
    transform: FunctionInFile | None = key(None, "A function row -> row, applied to every row before it is encoded.")
    chat_template: Text | None = key(
        None,
        "null: the tokenizer's own; chatml: the built-in ChatML template; the name of another one that the tokenizer "
        "has (tool_use); otherwise a Jinja file.",
    )
    template_kwargs: dict[str, object] = key(
        {},
        "Values for the chat template, e.g. {enable_thinking: false, reasoning_effort: high}; those of a row "
        "(chat_template_kwargs) take precedence. final/ has a template with them. strftime_now: 2025-01-31 is the date "
        "that a template prints.",
    )
    on_prompt_mismatch: Literal["fail", "accept"] = key(
        "fail",
        "What happens if the chat template opens the last trained answer of a row otherwise than it does in "
        "generation. fail: an error with the first difference; accept: such rows are trained and counted.",
    )
    system_prompt: Text | None = key(None, "The system turn of conversations without one; null: none is added.")
    train_on: Literal["assistant", "last_assistant", "all"] = key(
        "assistant", "Which tokens are targets: all of the assistant's turns, its last turn, or every token."
    )
    thinking: ThinkingChoice | None = key(
        None,
        "Reasoning of trained turns that the chat template does not print. keep: it is written before the answer, as "
        "the template does elsewhere or in <think> tags; last: likewise after the last question, and all earlier "
        "reasoning is left out; template: what is not printed is left out; strip: all reasoning is left out. What is "
        "left out is counted. null: it is an error.",
    )
    ignored_keys: list[Text] = key(
        [],
        "Keys of messages, and of a row's chat_template_kwargs, that have no meaning for training, e.g. [turn_id, "
        "language]; other unknown ones are errors.",
    )
    max_length: int = key(2048, "Maximum tokens of one row.", ge=2)
    on_too_long: Literal["truncate", "drop", "fail", "split"] = key(
        "truncate",
        "What happens to rows longer than `max_length`. split: they become windows of that length, each a row, and "
        "every target is trained once. Truncated, dropped and split rows are counted.",
    )
    split_stride: Count | None = key(
        None,
        "With `on_too_long: split`: how many tokens further each window begins; those that it repeats are no targets "
        "again. null: max_length - 1.",
    )
    on_bad_row: Literal["fail", "skip"] = key(
        "fail", "What happens to rows that cannot be used; skipped ones are counted and reported with file and row."
    )
    max_bad_rows: int = key(100, "With `on_bad_row: skip`: how many rows may be skipped before the run fails.", ge=0)
    quarantine: Text | None = key(
        None,
        "A file of training rows that are left out, each named by the hash of its content: lines {hash, file, row, "
        "reason}, as `shardtune replay --quarantine` writes them. The other rows keep their order, and evaluation rows "
        "stay. null: none.",
    )
    shuffle: bool = key(True, "Shuffle the rows by seed and epoch; false: in the order of the files.")
    num_workers: int = key(
        2, "Processes that build the cache and decode rows; 0: only the main process.", ge=0, le=1024
    )
    image_hosts: Annotated[list[Text], Distinct] = key(
        [],
        "Hosts from which images that rows name by URL are fetched, e.g. [images.example.com, '*.example.org']; '*': "
        "any host. Addresses of this machine and of private networks are never used.",
    )
    keep_pixels: bool = key(
        False,
        "Store the resized pixels of each image (bytes) in the cache when it is first read: later epochs and runs do "
        "not decode it. Takes about width x height x 3 bytes at the processor's output size.",
    )
    augmentation: AugmentationConfig = section(
        AugmentationConfig,
        "Random changes of training images, made after the cache, in which they are unchanged. Evaluation and acting "
        "see images as they are.",
    )
    cache_dir: Text | None = key(None, "Where tokenised rows are stored; null: the user's cache directory.")
    cache: Literal["whole", "by_file"] = key(
        "whole",
        "When training rows are tokenised. whole: all of them, before the first step; by_file: file by file while "
        "training goes on, so it begins after the first one. Then files are shuffled, and rows within `mixed_files` of "
        "them; `runner.max_steps` is required.",
    )
    mixed_files: Count | None = key(
        None,
        "With `cache: by_file`: how many files rows are shuffled within; the first file of a run is alone. null: 4.",
    )
    cache_limit: Number | None = key(
        None,
        "With `cache: by_file`: GiB of tokenised training rows on disk. Beyond it the files that are needed last are "
        "removed, and tokenised again when their turn comes; those in use and the next ones stay. null: no limit.",
        gt=0,
    )
    audit: AuditConfig = section(
        AuditConfig,
        "Limits of what is in the training rows and in evaluation; beyond one, training is refused before it starts. "
        "`shardtune data audit` shows what is found.",
    )
