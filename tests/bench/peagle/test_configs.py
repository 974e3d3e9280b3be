"""Which servers the benchmark of P-EAGLE compares, and which shapes they have."""

from pathlib import Path

import pytest

from benchmarks.peagle import KS, MOST_LEVELS, parse
from benchmarks.peagle_report import FORMS, group_configs, group_specs, shape_of
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.servers import child_environment
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import MAX_WIDTH, Shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [*KS, 2, MOST_LEVELS])
def test_every_shape_is_within_the_limits_of_both_engines(form, k):
    shape = shape_of(form, k)
    assert shape.steps == k <= 16 and shape.draft_slots <= MAX_WIDTH >= shape.width
    assert shape.draft_slots <= shape.width - 1  # the slots that vLLM reserves for an EAGLE-3 head
    assert shape.width - 1 <= shape.candidates
    assert shape.max_accept_length == k + 1


def test_the_servers_of_a_form():
    plain = ServerSpec(target=Path("target"), mode="plain", head=Path("eagle3"))
    specs = group_specs(plain, Path("peagle"), "tree", KS)
    assert list(specs) == [
        "plain tree",
        "eagle3 3/2/8", "eagle3 7/2/16", "eagle3 11/2/24", "peagle 3/2/8", "peagle 7/2/16", "peagle 11/2/24",
    ]  # fmt: skip
    assert [str(config) for config in group_configs("tree", KS)] == list(specs)
    assert len({spec.label for form in FORMS for spec in group_specs(plain, Path("p"), form, KS).values()}) == 14
    for name, spec in specs.items():
        environment = child_environment(spec, {})
        assert environment.get("EAGLE_POLICY") == (None if name == "plain tree" else "fixed")
        assert environment.get("EAGLE_DRAFT_TIMES") == (None if name == "plain tree" else "1")
        assert spec.head == Path("peagle" if "peagle" in name else "eagle3")
    assert specs["eagle3 3/2/8"].shape == Shape(3, 2, 8)


def test_vllm_gets_the_levels_of_the_tree():
    plain = ServerSpec(target=Path("target"), mode="plain", head=Path("eagle3"), engine="vllm")
    command = ENGINES["vllm"].command(group_specs(plain, Path("peagle"), "tree", [11])["peagle 11/2/24"], 1)
    assert '{"eagle_plugin": {"depth": 11, "topk": 2}}' in command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ks", "1"], "'1' was given, wanted a number of at least 2"),
        (["--ks", "17"], "'17' was given, wanted 2 to 16 levels"),
        (["--forms", "star"], "star"),
        (["--concurrency", "0"], "'0' was given"),
    ],
)
def test_bad_options_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as left:
        parse(flags)
    assert left.value.code == 2 and message in capsys.readouterr().err
