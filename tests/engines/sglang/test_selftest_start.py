"""What a self-test keeps, how ranks agree, and who serves in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

import skewed_mask
from serving import answers_of_own_worker

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.selftest import decision, record, suite
from eagle_plugin.selftest.failure import failure
from eagle_plugin.selftest.shapes import ModelShape, as_text
from eagle_plugin.selftest.subject import Subject, round_key
from eagle_plugin.sglang import fallback, selftest, support


@pytest.fixture
def kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder of records; the key of one."""
    monkeypatch.setattr(record, "folder", lambda: tmp_path / "selftest")
    return record.key_of("kernels", "cpu", {}, "sglang")


def ranks(monkeypatch: pytest.MonkeyPatch, others: Any) -> None:
    """This process is rank 0; others(value) are the values of the further ranks."""
    monkeypatch.setattr(selftest, "gather_objects", lambda value: [value, *others(value)])
    monkeypatch.setattr(selftest, "rank_logger", lambda logger: logger)


def decide(key: dict[str, Any], test: Callable[[], list[str]]) -> list[str]:
    """Among the ranks of `ranks`."""
    return decision.decide(key, test, selftest.gather_objects, selftest.logger)


def test_a_record_saves_the_test(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, lambda value: [])
    runs: list[int] = []

    def test() -> list[str]:
        runs.append(1)
        return ["verify_tree: wrong"]

    first = decide(kept, test)
    assert first == ["the self-test failed: verify_tree: wrong; after a repair run: eagle-plugin selftest --again"]
    assert decide(kept, test) == first and len(runs) == 1
    record.forget()
    assert decide(kept, lambda: []) == [] and decide(kept, test) == [] and len(runs) == 1


def raising(error: Exception) -> Callable[[], list[str]]:
    def test() -> list[str]:
        raise error

    return test


def test_a_test_that_raises_has_failed(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, lambda value: [])
    (reason,) = decide(kept, raising(RuntimeError("an illegal memory access was encountered\nmore")))
    assert "kernels: RuntimeError: an illegal memory access was encountered;" in reason


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory\nmore"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_a_test_without_memory_is_repeated_at_the_next_start(
    error: Exception, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It found no difference, so that our worker serves, and it found out nothing, so that nothing is kept."""
    ranks(monkeypatch, lambda value: [])
    assert decide(kept, raising(error)) == [] and record.read(kept) is None
    assert "self-test of the kernels is not complete, the next start repeats it: kernels: no memory" in caplog.text


def test_a_difference_counts_beside_a_check_without_memory(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In whatever rank either is."""
    left_out = failure("graphs of 8 requests", torch.OutOfMemoryError())
    ranks(monkeypatch, lambda value: [[left_out] if isinstance(value, list) else value])
    (reason,) = decide(kept, lambda: ["verify_tree: wrong"])
    assert "rank 0: verify_tree: wrong" in reason and "graphs of 8" not in reason
    assert record.read(kept).reasons == ["rank 0: verify_tree: wrong"]
    assert "rank 1: graphs of 8 requests: no memory was left for this check" in caplog.text


def test_a_result_that_cannot_be_kept_still_counts(
    kept: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks(monkeypatch, lambda value: [])
    (tmp_path / "selftest").write_text("a file")
    assert decide(kept, lambda: []) == [] and "every start will repeat it" in caplog.text
    assert decide(kept, lambda: ["wrong"])


def test_ranks_decide_alike(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank finds, all obey; a record counts if every rank has it."""
    wrong = "rank 1: tree_attention: wrong"
    ranks(monkeypatch, lambda value: [["tree_attention: wrong"] if isinstance(value, list) else value])
    assert wrong in decide(kept, lambda: [])[0]
    assert record.read(kept).reasons == [wrong]
    record.write(kept, [], 1.0)
    runs: list[int] = []
    ranks(monkeypatch, lambda value: [value if isinstance(value, list) else None])  # the other rank has no record
    assert decide(kept, lambda: runs.append(1) or []) == [] and runs == [1]


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_GRAPHS", raising=False)
    monkeypatch.delenv("EAGLE_SELFTEST", raising=False)
    assert selftest.is_wanted("cuda") and not selftest.is_wanted("cpu")
    monkeypatch.setenv("EAGLE_SELFTEST", "1")
    assert selftest.is_wanted("cpu")
    monkeypatch.delenv("EAGLE_SELFTEST")
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    assert selftest.is_wanted("cpu")


class Engine:
    """Stands for the engine's worker class."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


def created(monkeypatch: pytest.MonkeyPatch, reasons: list[str], failed: list[str]) -> Any:
    """What the worker factory makes where these flags and findings of the self-test speak against our worker."""
    from eagle_plugin.sglang import metrics, refused_requests, worker

    class Ours:
        shape, device, synthetic = Shape(3, 4, 16), "cpu", None
        draft_worker = SimpleNamespace(is_own_layer=False)

        def __init__(self, **arguments: Any) -> None:
            pass

    runner = SimpleNamespace(device="cpu")
    monkeypatch.setattr(support, "rank_logger", lambda logger: logger)
    monkeypatch.setattr(support, "unsupported_reasons", lambda *arguments: reasons)
    monkeypatch.setattr(selftest, "failed_kernels", lambda given: failed if given is runner else [])
    monkeypatch.setattr(worker, "TreeWorker", Ours)
    monkeypatch.setattr(metrics, "count_rounds", lambda *arguments: None)
    monkeypatch.setattr(refused_requests, "refuse_requests", lambda: support.logger.info("requests are refused"))
    names = {"speculative_draft_model_path": "HEAD", "model_path": "TARGET", "speculative_algorithm": "EAGLE3"}
    arguments = SimpleNamespace(**names)
    return support.worker_factory("EAGLE3", Engine)(arguments, 0, 1, SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(("reasons", "failed"), [(["--tp-size 99"], []), ([], ["the self-test failed: propose"])])
def test_the_factory_leaves_a_failed_device_to_the_engine(
    reasons: list[str], failed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(created(monkeypatch, reasons, failed), Engine)
    assert f"EAGLE3 is served by SGLang's own worker: {(reasons + failed)[0]}" in caplog.text


def test_who_serves_is_logged_when_it_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "eagle_plugin")
    worker = created(monkeypatch, [], [])
    assert not isinstance(worker, Engine) and not caplog.records
    worker.announce(["the self-test failed: graphs"])
    assert "served by SGLang's own worker: the self-test failed: graphs" in caplog.text
    assert "served by the plugin" not in caplog.text and "requests are refused" not in caplog.text
    worker.announce([])
    assert "EAGLE3 is served by the plugin's draft trees" in caplog.text and "requests are refused" in caplog.text


RUNNER = SimpleNamespace(device="cpu", dtype=torch.float32)
SUBJECT = Subject("cpu", 1, [32, 32], as_text(ModelShape()), {"layers": 2}, "sglang")


def rounds_of(
    monkeypatch: pytest.MonkeyPatch, found: list[str], failed: Sequence[str] = (), captured: Sequence[list[int]] = ()
) -> list[Any]:
    """What `check_rounds` does with a worker whose round's test gives these findings: tested, handed over, announced.

    failed: what its first rounds gave before.
    """
    done: list[Any] = []
    monkeypatch.setenv("EAGLE_SELFTEST", "1")
    ranks(monkeypatch, lambda value: [])
    monkeypatch.setattr(selftest, "subject_of", lambda runner: SUBJECT)
    monkeypatch.setattr(selftest, "parts_of", lambda worker: None)
    monkeypatch.setattr(selftest, "test_rounds", lambda parts: done.append("tested") or found)
    monkeypatch.setattr(fallback, "_restore", lambda worker: done.append("handed over"))
    worker = SimpleNamespace(
        device="cpu",
        target_worker=SimpleNamespace(model_runner=RUNNER),
        announce=lambda reasons: done.append(reasons),
        _round=SimpleNamespace(widest=lambda: list(captured)),
    )
    selftest.check_rounds(worker, failed)
    return done


def test_a_failed_round_is_handed_over_and_kept(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    done = rounds_of(monkeypatch, ["graphs: wrong"])
    assert done[:2] == ["tested", "handed over"] and "the self-test failed: graphs: wrong" in done[2][0]
    # The next start leaves the server to the engine at once, although its kernels are right.
    monkeypatch.setattr(suite, "run", lambda *arguments: suite.Report([]))
    assert selftest.failed_kernels(RUNNER) == done[2]
    record.forget()
    assert selftest.failed_kernels(RUNNER) == []
    assert rounds_of(monkeypatch, []) == ["tested", []]


def test_graphs_of_sizes_that_no_start_has_tested_are_tested(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with little memory captures few sizes; the next one may have more."""
    few, many = [[16, 16], [64, 16]], [[1, 16], [16, 16], [64, 16]]
    assert rounds_of(monkeypatch, [], captured=few) == ["tested", []]
    assert rounds_of(monkeypatch, [], captured=few[:1]) == [[]]
    assert rounds_of(monkeypatch, [], captured=many) == ["tested", []]
    assert rounds_of(monkeypatch, [], captured=many) == [[]] == rounds_of(monkeypatch, [], captured=few)
    assert rounds_of(monkeypatch, [], captured=[[16, 32]]) == ["tested", []]
    assert rounds_of(monkeypatch, [], captured=[*many, [16, 32]]) == [[]]  # all that has passed is kept
    assert rounds_of(monkeypatch, ["graphs: wrong"], captured=[[2, 16]])[:2] == ["tested", "handed over"]
    assert rounds_of(monkeypatch, [], captured=[[3, 16]])[0] == "handed over"  # whatever else would pass


def test_another_dtype_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SELFTEST", "1")
    (reason,) = selftest.failed_kernels(SimpleNamespace(device="cpu", dtype=torch.float64))
    assert reason == "--dtype float64: only bfloat16, float16, float32 are served"


def test_a_fallback_that_fails_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(worker: Any) -> None:
        raise AttributeError("no such backend\nmore")

    monkeypatch.setattr(fallback, "_restore", fails)
    with pytest.raises(StartRefused) as caught:
        fallback.fall_back(SimpleNamespace(), [], "do this")
    assert str(caught.value) == (
        "eagle-plugin: the self-test failed and SGLang's own worker could not take over (no such backend); do this"
    )


AGAIN = "/selftest kept: from now on it is served by SGLang's own worker"
SWITCHED_OFF = "start the server with EAGLE_PLUGIN=0: then it is served by SGLang's own worker"


@pytest.mark.parametrize("is_tested", [True, False])
@pytest.mark.parametrize(
    ("error", "is_kept", "is_writable"),
    [
        (RuntimeError("an illegal memory access"), True, True),
        (RuntimeError("an illegal memory access"), False, False),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
    ],
)
def test_after_a_start_that_failed_twice_the_sentence_is_true(
    error: Exception, is_kept: bool, is_writable: bool, is_tested: bool, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first round raises, and so does the way back: the next start is the engine's only if a record says so, and
    reads it. With more memory the first round may run: that is not kept."""
    ranks(monkeypatch, lambda value: [])
    failed = selftest.prepared(raising(error))
    if not is_writable:
        record.folder().write_text("a file")

    def fails(worker: Any) -> None:
        raise AttributeError("no such backend")

    monkeypatch.setattr(selftest, "subject_of", lambda runner: SUBJECT)
    monkeypatch.setattr(fallback, "_restore", fails)
    monkeypatch.setattr(selftest, "is_wanted", lambda device: is_tested)
    worker = SimpleNamespace(device="cpu", target_worker=SimpleNamespace(model_runner=RUNNER))
    with pytest.raises(StartRefused) as caught:
        selftest.check_rounds(worker, failed)
    sentence = str(caught.value)
    assert f"(a first round failed: {error}) and SGLang's own worker could not take over (no such backend)" in sentence
    assert sentence.endswith(AGAIN if is_kept and is_tested else SWITCHED_OFF)
    found = record.read(round_key(SUBJECT, "cpu"))
    assert (None if found is None else found.reasons) == (failed if is_kept and is_tested else None)
    monkeypatch.setattr(suite, "run", lambda *arguments: suite.Report([]))
    assert bool(selftest.failed_kernels(RUNNER)) == (is_kept and is_tested)  # of the next start


def test_first_rounds_that_failed_are_not_tried_again(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ["a first round failed: no kernel"]
    assert rounds_of(monkeypatch, [], failed) == ["handed over", failed]
    monkeypatch.setattr(suite, "run", lambda *arguments: suite.Report([]))
    assert "the self-test failed: a first round failed: no kernel" in selftest.failed_kernels(RUNNER)[0]


@pytest.mark.server
def test_after_a_failed_round_the_engines_own_worker_serves(tiny_target, tiny_eagle3, tmp_path):
    """With the objects, weights and pools that ours had: the log names what differed, and text is plain decoding's."""
    fault = skewed_mask.install(tmp_path / "plugin") | {"EAGLE_DEPLOY": str(tmp_path / "deploy")}
    (tmp_path / "deploy").mkdir(mode=0o700)
    found, log = answers_of_own_worker(tiny_target, tiny_eagle3, fault, tmp_path)
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in found)
    lines = [line for line in log.splitlines() if "eagle-plugin" in line]
    assert not list((tmp_path / "deploy").iterdir())  # no head of ours can be exchanged
    (line,) = [line for line in lines if "is served by SGLang's own worker" in line]
    assert "the self-test failed: a tree in one forward of the target: the logits of " in line
    assert not [line for line in lines if "served by the plugin" in line]
    assert any("the self-test of the kernels passed in" in line for line in lines)
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "plugin/cache/selftest").iterdir())]
    assert [(record["key"]["part"], not record["reasons"]) for record in kept] == [("kernels", True), ("round", False)]
