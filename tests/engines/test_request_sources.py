"""What requests say of their drafts is read, or refused: what was found, and what is allowed."""

from __future__ import annotations

import pytest

from eagle_plugin.runtime.request_sources import ALL, NONE, RequestError, Sources, asked_sources, read_sources

HEAD, LOOKUP = Sources(lookup=False), Sources(head=False)


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        (None, ALL),
        ({}, ALL),
        ({"draft": None, "sources": None}, ALL),
        ({"draft": True}, ALL),
        ({"draft": False}, NONE),
        ({"draft": False, "sources": ["head"]}, NONE),
        ({"sources": ["head"]}, HEAD),
        ({"draft": True, "sources": ["lookup"]}, LOOKUP),
        ({"sources": ("lookup", "head", "head")}, ALL),
        ("draft=off", NONE),
        ("Draft = OFF", NONE),
        ("draft=on", ALL),
        ("sources=head", HEAD),
        ("sources=lookup, head", ALL),
        ("draft=on; sources=lookup", LOOKUP),
    ],
)
def test_what_is_read(value: object, sources: Sources) -> None:
    assert read_sources(value) == sources
    assert read_sources(str(sources)) == sources, "the text that carries it says something else"


EXAMPLE = 'wanted an object such as {"draft": false} or {"sources": ["head"]}'
FORMS = "wanted draft=off, draft=on or sources=head,lookup"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, f"eagle_plugin is 3, {EXAMPLE}"),
        (False, f"eagle_plugin is false, {EXAMPLE}"),
        (["head"], f'eagle_plugin is ["head"], {EXAMPLE}'),
        ({"drafts": False}, 'eagle_plugin has the name "drafts", wanted draft, sources or features'),
        ({"draft": "no"}, 'eagle_plugin.draft is "no", wanted true or false'),
        ({"draft": 0}, "eagle_plugin.draft is 0, wanted true or false"),
        ({"draft": False, "sources": 1}, "eagle_plugin.sources is 1, wanted a list of names: head, lookup"),
        ({"sources": "head"}, 'eagle_plugin.sources is "head", wanted a list of names: head, lookup'),
        ({"sources": ["head", "ngram"]}, 'eagle_plugin.sources has "ngram", wanted head or lookup'),
        ({"sources": [["head"]]}, 'eagle_plugin.sources has ["head"], wanted head or lookup'),
        (
            {"sources": []},
            'eagle_plugin.sources is [], wanted one or more of head, lookup; {"draft": false} asks for no drafts',
        ),
        ("off", f'eagle_plugin is "off", {FORMS}'),
        ("", f'eagle_plugin is "", {FORMS}'),
        ("draft=no", f'eagle_plugin is "draft=no", {FORMS}'),
        ("sources=ngram", 'eagle_plugin.sources has "ngram", wanted head or lookup'),
        ({"draft": "x" * 1000}, f'eagle_plugin.draft is "{"x" * 59}..., wanted true or false'),
    ],
)
def test_what_is_refused(value: object, sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_sources(value)
    assert str(refused.value) == sentence
    assert asked_sources({"eagle_plugin": value}) == ALL, "a worker that gets it must go on"


@pytest.mark.parametrize("parameters", [None, {}, {"other": 1}, {"eagle_plugin": None}, [1]])
def test_parameters_without_the_field(parameters: object) -> None:
    assert asked_sources(parameters) == ALL  # type: ignore[arg-type]
