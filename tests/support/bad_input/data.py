"""Mistakes in data files, rows, transforms, templates and tokenizers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.support.bad_input.case import Case, Prepare, chat, train_rows, with_keys, write
from tests.support.workspace import END, make_tokenizer, rows, write_rows

FIVE_THOUSAND = (
    "".join(json.dumps(row) + "\n" for row in rows(4999)) + '{"messages": [\n' + json.dumps(rows(1)[0]) + "\n"
)
KEEPS_USERS = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SOME = "".join(json.dumps(row) + "\n" for row in rows(4))
DATA: list[Case] = [
    with_keys(
        "a missing file",
        "data.train_data_paths=trian.jsonl",
        says="trian.jsonl | does not exist | did you mean | train.jsonl",
    ),
    with_keys(
        "a missing evaluation file",
        "data.eval_data_paths={math: nowhere/a.jsonl}",
        says="nowhere/a.jsonl | does not exist | directory",
    ),
    with_keys(
        "a pattern without a match",
        "data.train_data_paths='parts/*.jsonl'",
        says="nothing matches | parts/*.jsonl | check the pattern",
    ),
    with_keys(
        "a directory without data",
        "data.train_data_paths=empty",
        says="holds no data file | empty | .jsonl",
        prepare=lambda work: (work / "empty").mkdir(),
    ),
    with_keys(
        "a kind of file nobody knows",
        "data.train_data_paths=./notes.docx",
        says="notes.docx | not known | .parquet",
        prepare=write("notes.docx", "?"),
    ),
    with_keys("an empty file", says="empty | train.jsonl", prepare=write("train.jsonl", "")),
    with_keys("a file of blank lines", says="no rows | train.jsonl", prepare=write("train.jsonl", "\n\n")),
    with_keys(
        "broken JSON at row 5,000",
        says='broken JSON | {"messages": [ | train.jsonl: row 5,000 | data.on_bad_row=skip',
        prepare=write("train.jsonl", FIVE_THOUSAND),
    ),
    with_keys(
        "a stride without windows",
        "data.split_stride=8",
        says="data.split_stride (8) has no effect | data.on_too_long: split",
    ),
    with_keys(
        "a stride beyond a window",
        "data.split_stride=16",
        "data.on_too_long=split",
        "data.max_length=16",
        says="data.split_stride (16) is not below data.max_length (16) | at most 15",
    ),
    with_keys(
        "labels that are shifted",
        says="labels has 6 where input_ids has 5 | shifted by one place | train.jsonl: row 1 | data.on_bad_row=skip",
        prepare=write("train.jsonl", '{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}\n'),
    ),
    with_keys(
        "a value that the chat template does not read",
        "data.template_kwargs={enable_thinking: false}",
        says="does not read the argument 'enable_thinking' | data.template_kwargs | leave it out",
    ),
    with_keys(
        "broken JSON at the first row",
        says="broken JSON | train.jsonl: row 1 | data.on_bad_row=skip",
        prepare=write("train.jsonl", "{'a': 1}\n"),
    ),
    with_keys(
        "half of a surrogate pair",
        says="U+D800, half of a surrogate pair | train.jsonl: row 5 | data.on_bad_row=skip",
        prepare=write("train.jsonl", SOME + json.dumps(chat(("user", "\ud800"), ("assistant", "a"))) + "\n"),
    ),
    with_keys(
        "a number of 5,000 digits",
        says="limit (4300 digits) | train.jsonl: row 5 | data.on_bad_row=skip",
        prepare=write("train.jsonl", SOME + '{"text": ' + "9" * 5000 + "}\n"),
    ),
    with_keys(
        "3,000 brackets",
        says="nested too deeply | train.jsonl: row 5 | data.on_bad_row=skip",
        prepare=write("train.jsonl", SOME + '{"text": ' + "[" * 3000 + "]" * 3000 + "}\n"),
    ),
    train_rows(
        "a weight beyond fp32",
        [
            *rows(4),
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": "!", "loss_weight": 1e39},
                ]
            },
        ],
        says="message 2: loss_weight is 1e+39 | train.jsonl: row 5 | 32-bit arithmetic",
    ),
    with_keys(
        "bytes that are not gzip's",
        "data.train_data_paths=train.jsonl.gz",
        says="cannot be read as jsonl | train.jsonl.gz",
        prepare=lambda work: (work / "train.jsonl.gz").write_bytes(gzip.compress(b"x" * 999)[:10] + b"\xff" * 50),
    ),
    with_keys(
        "text named Parquet",
        "data.train_data_paths=rows.parquet",
        says="cannot be read as parquet | rows.parquet",
        prepare=write("rows.parquet", "hello"),
    ),
    train_rows(
        "rows without an answer",
        [*rows(3), chat(("user", "and?"))],
        says="no assistant turn | train.jsonl: row 4 | data.on_bad_row=skip",
    ),
    train_rows(
        "an empty answer",
        [*rows(1), chat(("user", "and?"), ("assistant", " "))],
        says="message 2 | answer is empty | row 2 | skip",
    ),
    train_rows(
        "an unknown role", [chat(("user", "?"), ("narrator", "he said"))], says="'narrator' | known are system | row 1"
    ),
    train_rows(
        "a turn without a role",
        [*rows(1), {"messages": [{"content": "?"}]}],
        says="message 1: no role | content | row 2 | skip",
    ),
    train_rows(
        "an image",
        [chat(("user", [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]), ("assistant", "!"))],
        says="'image' | text only | row 1",
    ),
    train_rows("a column of images", [{**rows(1)[0], "images": ["a.png"]}], says="images | text only | row 1"),
    train_rows(
        "rows of no known format",
        [{"subject": "a", "body": "b"}],
        says="subject, body | instruction | data.columns | row 1",
    ),
    train_rows(
        "too many bad rows",
        [*rows(2), *[chat(("user", "?"))] * 5],
        "data.on_bad_row=skip",
        "data.max_bad_rows=3",
        says="5 rows cannot be used | data.max_bad_rows is 3 | row 3 | train.jsonl | raise data.max_bad_rows",
    ),
    with_keys(
        "rows that are too long",
        "data.on_too_long=fail",
        "data.max_length=20",
        says="data.max_length is 20 | row 1 | raise data.max_length",
    ),
    with_keys(
        "all rows cut before the answer", "data.max_length=8", says="no row is left | train.jsonl | data.max_length"
    ),
    with_keys(
        "columns that are not there", "data.columns={question: problem}", says="'problem' | data.columns | row 1"
    ),
    with_keys(
        "a transform that is not there",
        "data.transform=mine.py:change",
        says="'change' | mine.py | data.transform",
        prepare=write("mine.py", "def other(row): return row\n"),
    ),
    with_keys(
        "a transform that cannot be called",
        "data.transform=mine.py:change",
        says="'change' | mine.py | data.transform",
        prepare=write("mine.py", "change = 3\n"),
    ),
    with_keys(
        "a transform that raises",
        "data.transform=mine.py:change",
        says="KeyError: 'text' | data.transform | row 1",
        prepare=write("mine.py", "def change(row): return {'text': row['text']}\n"),
    ),
    with_keys(
        "a transform that does not import",
        "data.transform=mine.py:change",
        says="ZeroDivisionError | mine.py",
        prepare=write("mine.py", "1 / 0\n"),
    ),
]


def save_tokenizer(**options: str | None) -> Prepare:
    def prepare(work: Path) -> None:
        make_tokenizer(**options).save_pretrained(work / "model")
        if options.get("template", "") is None:
            (work / "model" / "chat_template.jinja").unlink(missing_ok=True)

    return prepare


def plain_text_without_end(work: Path) -> None:
    save_tokenizer(eos=None)(work)
    write_rows(work / "train.jsonl", [{"text": "once upon a time"}])


def without_end_or_template(work: Path) -> None:
    save_tokenizer(eos=None, template=None)(work)
    file = work / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace(END, "<|other|>"))


def system_rows(work: Path) -> None:
    write_rows(work / "train.jsonl", [chat(("system", "Be brief."), ("user", "?"), ("assistant", "!"))])
    (work / "mine.jinja").write_text(KEEPS_USERS)


TEMPLATES: list[Case] = [
    with_keys(
        "a template that drops a role",
        "data.chat_template=mine.jinja",
        says="leaves out system turns | message 1 | row 1",
        prepare=system_rows,
    ),
    with_keys(
        "a template that drops the answer",
        "data.chat_template=mine.jinja",
        says="leaves out the assistant's answer | template",
        prepare=write(
            "mine.jinja", "{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}<|im_end|>{% endfor %}"
        ),
    ),
    with_keys(
        "a template of broken Jinja",
        "data.chat_template=mine.jinja",
        says="Jinja | mine.jinja | line 1",
        prepare=write("mine.jinja", "{% for m in messages %}{{ m.content }"),
    ),
    with_keys(
        "a template without an end of turn",
        "data.chat_template=mine.jinja",
        says="no token that ends a turn | template | eos_token",
        prepare=write("mine.jinja", "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"),
    ),
    with_keys(
        "a template that is not there",
        "data.chat_template=missing.jinja",
        says="data.chat_template | missing.jinja | check the name",
    ),
    with_keys(
        "a tokenizer without a template",
        says="no chat template | data.chat_template | chatml",
        prepare=save_tokenizer(template=None),
    ),
    with_keys(
        "a tokenizer without an end, for text",
        says="no end-of-sequence token | row 1 | eos_token",
        prepare=plain_text_without_end,
    ),
    with_keys(
        "a tokenizer without an end, for chatml",
        "data.chat_template=chatml",
        says="end-of-sequence | chatml | eos_token",
        prepare=without_end_or_template,
    ),
]
