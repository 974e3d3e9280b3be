"""Synthetic acceptance on real servers: rounds that are captured and overlap, as on a GPU, meet the rates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import accept_length, generate_all, serving, tiny_spec
from tiny_models import tiny_eagle3_head, tiny_llama

pytest.importorskip("sglang")
from sglang_flags import SERVED

from eagle_plugin.core.synthetic import SyntheticRates, rates_of_length, rates_of_normal
from eagle_plugin.runtime.synthetic import VARIABLE, SyntheticError
from eagle_plugin.sglang import preflight
from eagle_plugin.sglang.synthetic import METHOD, SETTING, synthetic_rates
from eagle_plugin.traffic.settings import FOLDER

SHAPE = (3, 2, 11)  # all candidates of three levels, so that no tree is too flat
RATES = (0.85, 0.6, 0.4)
TABLE = "3/2/11=" + ",".join(map(str, RATES))
WAY = {"EAGLE_POLICY": "fixed", "EAGLE_OVERLAP": "1", "EAGLE_GRAPHS": "emulate"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("synthetic")
    target = tiny_llama(folder / "target")
    return target, tiny_eagle3_head(folder / "head", target)


def served(models: tuple[Path, Path], logs: Path, more: dict[str, str]) -> tuple[float, str]:
    """The accept length of greedy and of sampled requests of a server with these variables, and its log."""
    with serving([tiny_spec(*models, SHAPE, environment=WAY | more)], logs) as (server,):
        prompts = [f"number {i} of many" for i in range(8)]
        greedy = generate_all(server, prompts, 120, at_once=8, ignore_eos=True)
        sampled = generate_all(server, prompts, 120, at_once=8, ignore_eos=True, temperature=1.0)
        return accept_length(greedy + sampled), server.log.read_text(encoding="utf-8")


@pytest.mark.server
@pytest.mark.matrix  # a server; the rates are those of `tests/engines/test_synthetic.py`, captured and on fake CUDA
def test_a_server_meets_the_rates(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Within 5 %, of some 650 rounds: three standard deviations of their mean."""
    length, log = served(models, tmp_path, {VARIABLE: TABLE})
    assert length == pytest.approx(1 + sum(RATES), rel=0.05) and f"SYNTHETIC ACCEPTANCE ({VARIABLE})" in log


@pytest.mark.server
@pytest.mark.matrix  # the control of the test above, and the other way to give rates, which the tests below read
@pytest.mark.parametrize(("more", "low", "high"), [({}, 1.0, 1.5), ({SETTING: "2.4"}, 2.28, 2.52)])
def test_other_servers(
    models: tuple[Path, Path], tmp_path: Path, more: dict[str, str], low: float, high: float
) -> None:
    """Without rates the head knows nothing; with SGLang's own variable the plugin serves too."""
    length, log = served(models, tmp_path, more)
    assert low <= length <= high
    assert (f"SYNTHETIC ACCEPTANCE ({SETTING})" in log) == bool(more)


def test_the_engines_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert synthetic_rates(3) is None
    monkeypatch.setenv(SETTING, "2.6")
    assert synthetic_rates(3) == SyntheticRates((), rates_of_length(2.6, 3))
    monkeypatch.setenv(METHOD, "multinomial")
    assert synthetic_rates(3) == SyntheticRates((), rates_of_normal(2.6, 3))
    monkeypatch.setenv(METHOD, "other")
    with pytest.raises(SyntheticError, match=f"{METHOD} is 'other', wanted match-expected or multinomial"):
        synthetic_rates(3)


def test_a_launch_that_cannot_be_served_is_refused(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is started: a table that cannot be read, and traffic that would be recorded."""
    from sglang.srt.arg_groups import model_override_base

    target, head = map(str, models)
    arguments = SimpleNamespace(**SERVED | {"model_path": target, "speculative_draft_model_path": head})
    monkeypatch.setattr(model_override_base, "resolved_view", lambda given: given)
    monkeypatch.setattr(preflight, "unsupported_flags", lambda given: [])
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(SystemExit, match=f"eagle-plugin: {VARIABLE} has 'yes', wanted"):
        preflight.check_launch(arguments)
    monkeypatch.setenv(VARIABLE, TABLE)
    preflight.check_launch(arguments)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(SystemExit, match="would record it for training"):
        preflight.check_launch(arguments)
