"""The privacy filter over many prompts: in worker processes, with results in the order of the input."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from eagle_plugin.common.installed import install_command
from eagle_plugin.learning.data.privacy.phones import PHONE_REGIONS
from eagle_plugin.learning.data.privacy.redact import redact
from eagle_plugin.learning.data.privacy.scanner import Scanner
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.prompts import Prompt

CHUNK = 64  # prompts that a worker takes at a time
CHUNKS_AHEAD = 4  # submitted per worker before the first result is awaited
MOST_NAMES = 1000  # that are remembered; a client could send ever new ones
PRIVATE = "private"
UNDECODED = "token ids, which need --tokenizer"
FilterPrompts = Callable[[Iterable["RawPrompt"]], Iterator["FilteredPrompt"]]


@dataclass(frozen=True)
class RawPrompt:
    """A prompt before the filter.

    `exact` is the same prompt as token ids, which is used if the filter changes nothing.
    """

    where: str  # the place of its record, as `file:line`
    prompt: Prompt
    exact: Prompt | None = None


@dataclass(frozen=True)
class FilteredPrompt:
    """The filter's result for one prompt."""

    where: str
    prompt: Prompt | None  # None: left out
    reason: str = ""  # why it is left out
    found: Counter[str] = field(default_factory=Counter)  # number of findings by type


@dataclass(frozen=True)
class PrivacySettings:
    """How prompts are filtered."""

    mode: str  # one of `redact.MODES`
    recogniser: str | None = None  # "module:function" of the user, see `redact.Scanner`
    phone_regions: tuple[str, ...] = PHONE_REGIONS  # whose phone numbers are found without a country code
    tokenizer: str | None = None  # folder of the tokenizer that decodes prompts of token ids


class PrivacyFilter:
    """Filters one prompt at a time.

    Raises:
        DataError: the recognisers or the tokenizer cannot be loaded.
    """

    def __init__(self, settings: PrivacySettings) -> None:
        self._mode = settings.mode
        self._scanner = Scanner(settings.recogniser, settings.phone_regions) if settings.mode != "off" else None
        self._tokenizer: Any = _load_tokenizer(settings.tokenizer) if settings.tokenizer else None
        self._passed: dict[str, bool] = {}

    @property
    def decodes(self) -> bool:
        """Whether token ids can be filtered: there is a tokenizer."""
        return self._tokenizer is not None

    def remembering(self) -> AbstractContextManager[None]:
        """While the block runs, a text is read once: the answers to one request have their prompt in common."""
        return self._scanner.remembering() if self._scanner else nullcontext()

    def passes(self, text: str) -> bool:
        """Whether a short text has no private data; a name such as that of a domain is remembered."""
        if text not in self._passed:
            if len(self._passed) >= MOST_NAMES:
                return False
            result = self.apply(RawPrompt("", Prompt("", "", prompt=text)))
            self._passed[text] = result.prompt is not None and not result.found
        return self._passed[text]

    def apply(self, raw: RawPrompt) -> FilteredPrompt:
        """Drop the prompt, redact it or pass it on, as the mode says."""
        prompt = raw.exact or raw.prompt
        if self._scanner is None:
            return FilteredPrompt(raw.where, prompt)
        given_ids = _ids_of(raw.prompt)
        if given_ids and self._tokenizer is None:
            return FilteredPrompt(raw.where, None, UNDECODED)
        strings = _strings_of(raw.prompt) + [self._tokenizer.decode(one) for one in given_ids]
        changed, found = redact(strings, self._scanner)
        may_hide = raw.exact is not None and not found and self._mode != "report"
        if may_hide and self._hides_more(prompt, self._scanner):
            prompt = raw.prompt
        if not found or self._mode == "report":
            return FilteredPrompt(raw.where, prompt, found=found)
        # Redacted text, encoded again, would not be the ids that the target read or generated. So ids are not redacted.
        if self._mode == "drop" or given_ids:
            return FilteredPrompt(raw.where, None, PRIVATE, found)
        try:
            return FilteredPrompt(raw.where, _with_strings(raw.prompt, changed), found=found)
        except ValueError:
            return FilteredPrompt(raw.where, None, PRIVATE, found)

    def _hides_more(self, exact: Prompt, scanner: Scanner) -> bool:
        """Whether the token ids of a record have private data that its texts do not have, as in hidden reasoning."""
        return self.decodes and any(scanner.scan(self._tokenizer.decode(one)) for one in _ids_of(exact))


def _ids_of(prompt: Prompt) -> list[list[int]]:
    """The token ids of the prompt and of its answer, where it has them."""
    ids = [prompt.prompt_ids, (prompt.response or {}).get("token_ids")]
    return [one for one in ids if one is not None]


def _load_tokenizer(folder: str) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise DataError(f"--tokenizer needs transformers; run: {install_command('data')}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {folder} holds no tokenizer; give the folder of the target") from error


_TEXT_KEYS = ("content", "reasoning_content")


def _strings_of(prompt: Prompt) -> list[str]:
    """Every string of the prompt. Structured parts are one JSON string each, so that a value is next to its name."""
    strings = []
    for turn in prompt.messages or []:
        rest = {key: item for key, item in turn.items() if key not in (*_TEXT_KEYS, "role")}
        strings += [*(turn.get(key) or "" for key in _TEXT_KEYS), json.dumps(rest, ensure_ascii=False)]
    answer = (prompt.response or {}).get("text") or ""
    return [*strings, prompt.prompt or "", answer, json.dumps([prompt.tools, prompt.sampling], ensure_ascii=False)]


def _with_strings(prompt: Prompt, strings: list[str]) -> Prompt:
    """The prompt with other strings, in the order of `_strings_of`.

    Raises:
        ValueError: a placeholder is in place of a number of the sampling parameters, such as the seed.
    """
    rest = iter(strings)
    messages = []
    for turn in prompt.messages or []:
        texts = {key: text for key, text in zip(_TEXT_KEYS, islice(rest, 2), strict=True) if key in turn}
        messages.append({"role": turn["role"], **texts, **json.loads(next(rest))})
    text, answer, structure = islice(rest, 3)
    tools, sampling = json.loads(structure)
    if any(type(value) is not type(prompt.sampling.get(key)) for key, value in sampling.items()):
        raise ValueError("a sampling parameter is not of its type any more")
    response = {**prompt.response, "text": answer} if prompt.response else None
    raw = None if prompt.prompt is None else text
    return replace(prompt, messages=messages or None, prompt=raw, tools=tools, sampling=sampling, response=response)


@contextmanager
def open_filter(settings: PrivacySettings, workers: int) -> Iterator[FilterPrompts]:
    """A function that filters prompts in order: in this process for one worker, in a pool of processes for more.

    Raises:
        DataError: when the context is entered, if the filter cannot be loaded; later, if a worker dies.
    """
    if workers <= 1 or settings.mode == "off":
        own = PrivacyFilter(settings)
        yield lambda prompts: map(own.apply, prompts)
        return
    # A fork server: one process imports the recognisers once and forks the workers. A fork of this process would copy
    # its locks while other threads, such as those of progress bars, may hold them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["eagle_plugin.learning.data.privacy.filter", "presidio_analyzer.predefined_recognizers"]
    )
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    try:
        pool.submit(_check_worker, settings).result()
        yield lambda prompts: _filter_chunks(pool, settings, prompts, workers)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process of the privacy filter died, perhaps for memory; use fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _filter_chunks(
    pool: ProcessPoolExecutor, settings: PrivacySettings, prompts: Iterable[RawPrompt], workers: int
) -> Iterator[FilteredPrompt]:
    pending: deque[Future[list[FilteredPrompt]]] = deque()
    source = iter(prompts)
    while True:
        while len(pending) < workers * CHUNKS_AHEAD and (chunk := list(islice(source, CHUNK))):
            pending.append(pool.submit(_filter_chunk, settings, chunk))
        if not pending:
            return
        yield from pending.popleft().result()


_filters: dict[PrivacySettings, PrivacyFilter] = {}  # of a worker process


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; workers ignore it, and the parent stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _check_worker(settings: PrivacySettings) -> None:
    _filters[settings] = PrivacyFilter(settings)


def _filter_chunk(settings: PrivacySettings, chunk: list[RawPrompt]) -> list[FilteredPrompt]:
    if settings not in _filters:
        _filters[settings] = PrivacyFilter(settings)
    return [_filters[settings].apply(raw) for raw in chunk]
