"""Requests that end inside of an accepted run of tokens, for both engines, and the models that accept such runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiny_checkpoints import read_config, write_config
from tiny_models import markov_eagle3_head, markov_target, read_markov_map
from tokenizers import Tokenizer

RUN = 7  # tokens of a round in which every draft is accepted
PROMPT = "tree root leaf"
LENGTH = 5 * RUN
END = 4 * RUN + 2  # where the end token of the target is in the text


class Models(NamedTuple):
    """A target whose greedy text is known, with its end token in it, and a head that always drafts it right."""

    target: Path
    head: Path
    ids: list[int]  # [LENGTH] what greedy decoding says after PROMPT
    pieces: list[str]  # [LENGTH] their texts


def write_models(folder: Path) -> Models:
    target = markov_target(folder / "target", head_dim=32)
    tokenizer, following = Tokenizer.from_file(str(target / "tokenizer.json")), read_markov_map(target)
    ids = [int(following[tokenizer.encode(PROMPT, add_special_tokens=False).ids[-1]])]
    while len(ids) < LENGTH:
        ids.append(int(following[ids[-1]]))
    assert len(set(ids)) == LENGTH  # so a text is at one place only
    write_config(target, **read_config(target) | {"eos_token_id": ids[END]})
    head = markov_eagle3_head(folder / "head", target, reduced=True)
    return Models(target, head, ids, [tokenizer.decode([token]) for token in ids])


def stop_settings(ids: Sequence[int], pieces: Sequence[str]) -> list[dict[str, Any]]:
    """Settings with SGLang's names, each of which ends the text in another place of a round."""

    def text(first: int, count: int) -> str:
        return "".join(pieces[first : first + count])

    settings: list[dict[str, Any]] = []
    for i in range(RUN, 3 * RUN):
        first, later, whole, half = text(i, 2), text(i + 3, 2), text(i, 6), pieces[i][-1] + pieces[i + 1][0]
        settings += [
            {"stop": [later, first]},  # the one that is listed first is complete last
            {"stop": [whole, half]},  # the one that is listed first begins before the other, and ends after it
            {"stop": [later, first], "max_new_tokens": i + 3},  # it is complete after the greatest length
            {"stop": [later, first], "no_stop_trim": True},
            {"stop_regex": [re.escape(later), re.escape(first)]},
            {"stop": [later], "stop_regex": [re.escape(first)]},
            {"stop": [later], "stop_token_ids": [ids[i + 1]], "ignore_eos": False},  # a stop token before a stop string
            {"stop_token_ids": [ids[i + 4], ids[i + 2]], "ignore_eos": False},
            {"stop_token_ids": [ids[i + 2]], "ignore_eos": False, "max_new_tokens": i + 2},
            {"max_new_tokens": i},
            {"stop": [later, first], "min_new_tokens": i + 3},
        ]
    for i in range(END - RUN, END):
        settings += [
            {"stop": [text(END + 1, 2), text(i, 2)], "ignore_eos": False},
            {"stop": [text(END + 1, 2)], "ignore_eos": False},  # the end token comes before the stop
            {"stop": [text(END + 1, 2)], "ignore_eos": False, "max_new_tokens": i + 2},
            {"ignore_eos": False, "min_new_tokens": i},
            {"ignore_eos": False, "max_new_tokens": i + 2},
        ]
    return [{"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True} | setting for setting in settings]
