"""Prompts through the privacy filter, in worker processes and in order."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from eagle_plugin.data.privacy.redact import Scanner, redact
from eagle_plugin.data.rows import DataError
from eagle_plugin.data.sources.prompts import Prompt

CHUNK = 64  # prompts that a worker takes at a time
AHEAD = 4  # chunks a worker that may wait
PRIVATE = "private"
UNDECODED = "token ids, which need --tokenizer"
Screen = Callable[[Iterable["Draft"]], Iterator["Screened"]]


@dataclass(frozen=True)
class Draft:
    """A prompt to be screened; `exact` is the same as token ids, for the case that nothing in it changes."""

    where: str
    prompt: Prompt
    exact: Prompt | None = None


@dataclass(frozen=True)
class Screened:
    """What came of a draft: the prompt, or the reason why it goes; and how often which type was found."""

    where: str
    prompt: Prompt | None
    reason: str = ""
    found: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Settings:
    """How prompts are screened: a mode of `privacy.MODES`, a user's recogniser, a tokenizer to read token ids with."""

    mode: str
    recogniser: str | None = None
    tokenizer: str | None = None


class Filter:
    """Screens one prompt at a time.

    Raises:
        DataError: the recognisers or the tokenizer cannot be loaded.
    """

    def __init__(self, settings: Settings) -> None:
        self._mode = settings.mode
        self._scanner = Scanner(settings.recogniser) if settings.mode != "off" else None
        self._tokenizer: Any = _load_tokenizer(settings.tokenizer) if settings.tokenizer else None

    def screen(self, draft: Draft) -> Screened:
        """Drop, redact or pass the draft on, by the mode."""
        prompt = draft.exact or draft.prompt
        if self._scanner is None:
            return Screened(draft.where, prompt)
        pieces = _take_apart(draft.prompt)
        ids_of = [draft.prompt.prompt_ids, (draft.prompt.response or {}).get("token_ids")]
        ids = [one for one in ids_of if one is not None]
        tokenizer = self._tokenizer
        if ids and tokenizer is None:
            return Screened(draft.where, None, UNDECODED)
        texts = pieces + [tokenizer.decode(one) for one in ids]
        changed, found = redact(texts, self._scanner)
        if not found or self._mode == "report":
            return Screened(draft.where, prompt, found=found)
        # Redacting ids would give other ids than the target's own, so such a row can only go.
        if self._mode == "drop" or ids:
            return Screened(draft.where, None, PRIVATE, found)
        try:
            return Screened(draft.where, _put_together(draft.prompt, changed), found=found)
        except ValueError:  # a placeholder where JSON wants a number, for instance
            return Screened(draft.where, None, PRIVATE, found)


def _load_tokenizer(folder: str) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise DataError("--tokenizer needs transformers; run: pip install 'eagle-plugin[data]'") from error
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {folder} holds no tokenizer; give the folder of the target") from error


_TEXTS = ("content", "reasoning_content")


def _take_apart(prompt: Prompt) -> list[str]:
    """Every string of the prompt; what has a structure goes as JSON, where a value stands beside its name."""
    pieces = []
    for turn in prompt.messages or []:
        rest = {key: item for key, item in turn.items() if key not in (*_TEXTS, "role")}
        pieces += [*(turn.get(key) or "" for key in _TEXTS), json.dumps(rest, ensure_ascii=False)]
    answer = (prompt.response or {}).get("text") or ""
    return [*pieces, prompt.prompt or "", answer, json.dumps([prompt.tools, prompt.sampling], ensure_ascii=False)]


def _put_together(prompt: Prompt, pieces: list[str]) -> Prompt:
    """The prompt with other strings, in the order of `_take_apart`."""
    rest = iter(pieces)
    messages = []
    for turn in prompt.messages or []:
        texts = {key: text for key, text in zip(_TEXTS, islice(rest, 2), strict=True) if key in turn}
        messages.append({"role": turn["role"], **texts, **json.loads(next(rest))})
    text, answer, structure = islice(rest, 3)
    tools, sampling = json.loads(structure)
    response = {**prompt.response, "text": answer} if prompt.response else None
    raw = None if prompt.prompt is None else text
    return replace(prompt, messages=messages or None, prompt=raw, tools=tools, sampling=sampling, response=response)


@contextmanager
def open_screen(settings: Settings, workers: int) -> Iterator[Screen]:
    """A function that screens drafts in order, in this process for one worker, in a pool of processes for more.

    Raises:
        DataError: at once, where the filter cannot be loaded; later, where a worker dies.
    """
    if workers <= 1 or settings.mode == "off":
        own = Filter(settings)
        yield lambda drafts: map(own.screen, drafts)
        return
    # A server that has imported the recognisers once, and forks: threads of this process (progress bars) are not in it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eagle_plugin.data.privacy.filter", "presidio_analyzer.predefined_recognizers"])
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    try:
        pool.submit(_check_worker, settings).result()
        yield lambda drafts: _screen_chunks(pool, settings, drafts, workers)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process of the privacy filter died, perhaps for memory; use fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _screen_chunks(
    pool: ProcessPoolExecutor, settings: Settings, drafts: Iterable[Draft], workers: int
) -> Iterator[Screened]:
    waiting: deque[Future[list[Screened]]] = deque()
    source = iter(drafts)
    while True:
        while len(waiting) < workers * AHEAD and (chunk := list(islice(source, CHUNK))):
            waiting.append(pool.submit(_screen_chunk, settings, chunk))
        if not waiting:
            return
        yield from waiting.popleft().result()


_filters: dict[Settings, Filter] = {}  # of a worker process


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group: the parent ends its workers, in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _check_worker(settings: Settings) -> None:
    _filters[settings] = Filter(settings)


def _screen_chunk(settings: Settings, chunk: list[Draft]) -> list[Screened]:
    if settings not in _filters:
        _filters[settings] = Filter(settings)
    return [_filters[settings].screen(draft) for draft in chunk]
