"""lm-evaluation-harness on a sharded model: rank 0 runs it, and all ranks compute its requests; needs `harness`."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import handle_non_serializable

from shardtune.batch.seeds import derive_seed, generators_kept, seed_generators
from shardtune.errors import ConfigError
from shardtune.evaluate.harness import Harness, HarnessModel, keep, scores
from shardtune.evaluate.harness_tasks import LoadedTasks
from shardtune.launch.progress import HARNESS, PROGRESS

# Decorators without types hide what these are.
HFLM: Any = huggingface.HFLM
simple_evaluate: Any = lm_eval.simple_evaluate
LIKELIHOOD, ANSWERS = "likelihood", "answers"
ROUND_BATCHES = 16
"""Forward passes of a rank between two messages of rank 0, at which a run may also stop."""
BOOTSTRAP = 1000
"""Resamples of a standard error that has no formula; the harness's 100,000 would take minutes in one process."""
BAR = re.compile(r"\r.*[\d?](it/s|s/it)", re.DOTALL)
ONE_PROCESS = "DISABLE_MULTIPROC"
"""Makes the harness compute standard errors in this process: a rank must not fork."""


class _Model:
    """What the harness's class of models calls; no module, so that it changes nothing in one."""

    def __init__(self, model: HarnessModel) -> None:
        self.device = model.ranks.device
        self.config = model.config
        self._model = model

    def __call__(self, tokens: torch.Tensor) -> SimpleNamespace:
        PROGRESS.beats += 1
        return SimpleNamespace(logits=self._model.logits(tokens))

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **arguments: object) -> torch.Tensor:
        PROGRESS.beats += 1
        return self._model.continued(input_ids, attention_mask, arguments)


def _of_transformers(kind: Any, model: HarnessModel, rows: int, settings: Mapping[str, Any]) -> Any:
    """The harness's class of models over the sharded one."""
    tokenizer = deepcopy(model.tokenizer)  # the harness may set its pad token
    # A batch for each so many requests: without the cache their number depends on nothing else.
    given = {**settings, "batch_size": rows, "logits_cache": False, "backend": "causal"}
    return kind(pretrained=_Model(model), tokenizer=tokenizer, **given)


@dataclass(frozen=True, slots=True)
class _Round:
    """Requests that all ranks compute together.

    Attributes:
        kind: LIKELIHOOD: pairs of tokens, context and continuation; ANSWERS: pairs of a text and generation settings.
        requests: of all ranks, sorted by length.
        number: of the round in this evaluation.
    """

    kind: str
    requests: Sequence[tuple[Any, Any]]
    number: int


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an evaluation: the scores, or why there are none."""

    scores: Mapping[str, float]
    problem: ConfigError | None = None


class _Shares:
    """Computes this rank's share of the requests.

    Args:
        model: sharded.
        settings: arguments of the harness's class of models.
        poll: called before each round, by all ranks alike.
    """

    def __init__(self, model: HarnessModel, settings: Mapping[str, Any], poll: Callable[[], None]) -> None:
        self.ranks = model.ranks
        self.rows = model.rows
        self.within = False
        self._poll = poll
        self._lm = _of_transformers(HFLM, model, model.rows, settings)

    def compute(self, batch: _Round) -> list[Any]:
        """The results of all ranks in the order of the requests; all ranks call it together.

        Each rank has as many requests, so that all have as many forward passes: where they do not come out even, a
        rank repeats the first one. Worked example: 5 requests on 2 ranks are 0 2 4 and 1 3 0.
        """
        self.within = True
        self._poll()
        PROGRESS.beats += 1
        ranks, requests = self.ranks, batch.requests
        own = list(requests[ranks.data_rank :: ranks.num_data_ranks])
        repeated = [requests[0]] * (-(-len(requests) // ranks.num_data_ranks) - len(own))
        if ranks.num_data_ranks > 1:  # one rank draws as the harness does
            seed_generators(derive_seed(batch.number, ranks.data_rank, "harness"), torch_alone=True)
        found = self._results(batch.kind, own + repeated)[: len(own)]
        parts = [part for part in ranks.gather(found if ranks.counts else None) if part is not None]
        results: list[Any] = [None] * len(requests)
        for number, part in enumerate(parts):
            results[number :: ranks.num_data_ranks] = part
        self.within = False
        return results

    def _results(self, kind: str, requests: Sequence[tuple[Any, Any]]) -> list[Any]:
        if kind == LIKELIHOOD:
            return self._lm._loglikelihood_tokens([(None, *request) for request in requests], disable_tqdm=True)
        instances = [Instance("generate_until", {}, request, number) for number, request in enumerate(requests)]
        return self._lm.generate_until(instances, disable_tqdm=True)

    def serve(self) -> _End:
        """Compute what rank 0 sends, until the evaluation ends."""
        while True:
            message = self.ranks.broadcast(None)
            if isinstance(message, _End):
                return message
            assert isinstance(message, _Round)
            self.compute(message)


class _Dealing(HFLM):
    """The harness's class of models on rank 0, which sends requests to all ranks instead of computing them."""

    shares: _Shares
    _rounds = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > self.max_length:
            raise ValueError(f"a continuation has {longest} tokens, and the model takes {self.max_length}")
        order = sorted(range(len(pairs)), key=lambda number: (-len(pairs[number][0]) - len(pairs[number][1]), number))
        size = self.shares.rows * ROUND_BATCHES
        return self._deal(LIKELIHOOD, pairs, order, size)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        pairs = [request.args for request in requests]
        lengths = [len(self.tok_encode(text)) for text, _ in pairs]
        order = sorted(range(len(pairs)), key=lambda number: (-lengths[number], pairs[number][0]))
        kinds = [json.dumps(settings, sort_keys=True, default=str) for _, settings in pairs]
        found: list[Any] = [None] * len(pairs)
        for kind in dict.fromkeys(kinds):  # a batch has one kind of settings, and ranks as many batches of each
            own = [number for number in order if kinds[number] == kind]
            most = normalize_gen_kwargs(dict(pairs[own[0]][1]), self.max_gen_toks).get("max_gen_toks", 0)
            if most >= self.max_length:
                raise ValueError(
                    f"answers may have {most} tokens, and the model takes {self.max_length}: set "
                    "eval.harness_options.gen_kwargs: {max_gen_toks: …}"
                )
            for number, text in zip(own, self._deal(ANSWERS, pairs, own, self.shares.rows), strict=True):
                found[number] = text
        return found

    def _deal(self, kind: str, pairs: Sequence[Any], order: Sequence[int], size: int) -> list[Any]:
        """The results of requests, in rounds of at most `size` of each rank.

        Returns:
            Of LIKELIHOOD in the order of the requests, of ANSWERS in that of `order`.
        """
        size *= self.shares.ranks.num_data_ranks
        sorted_results: list[Any] = []
        for start in range(0, len(order), size):
            chosen = [pairs[number] for number in order[start : start + size]]
            batch = _Round(kind, chosen, self._rounds)
            self._rounds += 1
            self.shares.ranks.broadcast(batch)
            sorted_results += self.shares.compute(batch)
        if kind == ANSWERS:
            return sorted_results
        results: list[Any] = [None] * len(order)
        for number, result in zip(order, sorted_results, strict=True):
            results[number] = result
        return results

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: the run's manifest describes the model, and the harness would ask the Hub for it."""
        return {}


@torch.no_grad()
def evaluate(
    harness: Harness, model: HarnessModel, tasks: LoadedTasks | None, *, poll: Callable[[], None], folder: Path | None
) -> dict[str, float]:
    """See `run_harness`."""
    ranks = model.ranks
    with generators_kept(), _quiet(), PROGRESS.during(HARNESS):
        shares = _Shares(model, harness.model_settings, poll)
        end = _run(harness, model, tasks, shares, folder) if ranks.is_main else shares.serve()
    if end.problem is not None:
        raise end.problem
    return dict(end.scores)


def _run(
    harness: Harness, model: HarnessModel, tasks: LoadedTasks | None, shares: _Shares, folder: Path | None
) -> _End:
    """The evaluation on rank 0; an error of the harness ends it on all ranks."""
    try:
        lm = _of_transformers(_Dealing, model, model.rows * model.ranks.num_data_ranks, harness.model_settings)
        lm.shares = shares
        settings = {"bootstrap_iters": BOOTSTRAP, **harness.settings}
        found = simple_evaluate(lm, tasks=list(harness.tasks), task_manager=tasks, batch_size=model.rows, **settings)
        end = _End(scores(found))
        if folder is not None:
            keep(found, folder, handle_non_serializable)
    except Exception as error:
        if shares.within:  # the other ranks are in the same round, and end with it
            raise
        problem = harness.problem(
            f"lm-evaluation-harness raised {type(error).__name__}: {error}",
            "look at eval.harness_options and the task; shardtune eval with eval.harness_options.limit=2 tries it "
            "quickly",
        )
        problem.__cause__ = error
        end = _End({}, problem)
    model.ranks.broadcast(_End(end.scores, _without_cause(end.problem)))
    return end


def _without_cause(problem: ConfigError | None) -> ConfigError | None:
    """The error for the other ranks: what raised it may not be picklable."""
    return None if problem is None else ConfigError(problem.what, where=problem.where, remedy=problem.remedy)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's notes and progress bars; what else is printed goes to standard error."""
    logger = logging.getLogger("lm_eval")
    level, processes = logger.level, os.environ.get(ONE_PROCESS)
    logger.setLevel(logging.ERROR)
    os.environ[ONE_PROCESS] = "1"
    passed = _WithoutBars(sys.stderr)
    try:
        with redirect_stderr(passed), redirect_stdout(passed):  # standard output is for the metrics
            yield
    finally:
        logger.setLevel(level)
        os.environ.pop(ONE_PROCESS)
        if processes is not None:
            os.environ[ONE_PROCESS] = processes


class _WithoutBars(TextIOBase):
    """Passes text on, except for the progress bars of tqdm."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._after_bar = False

    def write(self, text: str) -> int:
        before, self._after_bar = self._after_bar, BAR.match(text) is not None
        if not self._after_bar and not (before and text == "\n"):
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._out.encoding
