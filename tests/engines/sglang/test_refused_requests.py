"""What a running server is asked for and only the rounds of the engine's own worker do, by the engine's own checks."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
from engine_signatures import assignments, calls, holds

pytest.importorskip("sglang")
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import internal_state
from sglang.srt.speculative import spec_sampling_mask
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from eagle_plugin.sglang import refused_requests

THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    monkeypatch.setattr(refused_requests.HookRegistry, "apply_hooks", lambda: registered.setdefault("applied", True))
    monkeypatch.setattr(
        refused_requests.HookRegistry, "register", lambda name, hook, *_, **__: registered.update({name: hook})
    )
    refused_requests.refuse_requests()
    assert registered.pop("applied") and all(callable(pkgutil.resolve_name(name)) for name in registered)
    assert set(registered.values()) == {refused_requests.refuse_masks, refused_requests.check_threshold}


def test_sampling_masks_that_the_engine_gives_with_block_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = SimpleNamespace(speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0)
    monkeypatch.setattr(spec_sampling_mask, "get_spec", lambda: exact)
    request = SimpleNamespace(sampling_params=SimpleNamespace(min_p=0.0, top_k=1))
    for name, is_given in (("DFLASH", True), ("EAGLE3", False)):
        algorithm = SpeculativeAlgorithm.from_string(name)
        refused = spec_sampling_mask.validate_spec_sampling_mask_request(request, algorithm)
        assert (refused is None) == is_given
        found = refused_requests.refuse_masks(refused, request, algorithm)
        assert found == (refused_requests.NO_MASKS if is_given else refused)
    checked = "validate_spec_sampling_mask_request(req, self.spec_algorithm)"
    assert checked in assignments(Scheduler._handle_generate_request, "error_msg")
    assert calls(Scheduler._handle_generate_request, "self._reject_sampling_mask_request")
    assert holds(Scheduler._reject_sampling_mask_request, "HTTPStatus.BAD_REQUEST")


@pytest.mark.parametrize("key", THRESHOLDS)
def test_a_threshold_of_acceptance(key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    overrides: list[dict[str, Any]] = []
    context = SimpleNamespace(override=lambda source, **values: overrides.append(values))
    monkeypatch.setattr(internal_state, "get_context", lambda: context)
    counts = SimpleNamespace(spec_total_num_accept_tokens=0, spec_total_num_forward_ct=0)
    scheduler: Any = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE3"), metrics_reporter=counts)
    controller = internal_state.SchedulerInternalStateController(scheduler, False)

    def is_updated(value: float) -> bool:
        return controller.set_internal_state(SetInternalStateReq(server_args={key: value})).updated

    assert is_updated(0.5) and overrides == [{key: 0.5}]  # a control: the engine takes it
    original = internal_state.SchedulerInternalStateController._validate_accept_threshold
    monkeypatch.setattr(
        internal_state.SchedulerInternalStateController,
        "_validate_accept_threshold",
        lambda *arguments: refused_requests.check_threshold(original, *arguments),
    )
    assert not is_updated(0.5) and len(overrides) == 1 and f"{key} 0.5 is not served" in caplog.text
    assert is_updated(1.0) and overrides[1:] == [{key: 1.0}]
