"""Wrong arguments of the sampling functions: the native kernels and the torch path give the same error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels import sampling
from eagle_plugin.kernels.sampling import SamplingParams

PARAMS = SamplingParams.of(2, top_k=9)
INDEX = torch.arange(5).repeat(2, 1)
KEYS = torch.arange(2)


def propose(**changes: Any) -> object:
    given = {
        "logp": torch.full((2, 5), 0.2).log(),
        "index": INDEX,
        "params": PARAMS,
        "rng_keys": KEYS,
        "positions": KEYS,
        "k": 2,
        "draft_to_target": torch.arange(5),
    }
    return sampling.propose(**(given | changes))  # type: ignore[arg-type]


def verify(**changes: Any) -> object:
    given = {
        "tree": DraftTree.padding(torch.ones(2, dtype=torch.int64), 1),
        "logits": torch.zeros(2, 9),
        "params": PARAMS,
        "rng_keys": KEYS,
        "lengths": KEYS,
        "max_accept_length": 1,
    }
    return sampling.verify_tree(**(given | changes))  # type: ignore[arg-type]


def params(**changes: torch.Tensor) -> dict[str, Any]:
    return {"params": PARAMS._replace(**changes)}


def tree(**changes: torch.Tensor) -> dict[str, Any]:
    return {"tree": DraftTree.padding(torch.ones(2, dtype=torch.int64), 1)._replace(**changes)}


WRONG_PARAMS = [
    (
        params(temperatures=torch.tensor([1.0, 0.0])),
        ValueError,
        "params.temperatures[1] is 0, wanted above 0: greedy",
    ),
    (params(temperatures=torch.tensor([torch.nan, 1.0])), ValueError, "params.temperatures[0] is nan, wanted above 0"),
    (params(top_ks=torch.tensor([0, 1]).int()), ValueError, "params.top_ks[0] is 0, wanted at least 1: the vocabulary"),
    (params(top_ps=torch.ones(2).double()), TypeError, "params.top_ps is float64, wanted float32: convert it"),
    (params(min_ps=torch.ones(3)), ValueError, "params.min_ps has shape [3], wanted [2]: pass a tensor of that shape"),
]
WRONG_PROPOSE = WRONG_PARAMS + [
    ({"logp": torch.zeros(2, 5).double()}, TypeError, "logp is float64, wanted float32"),
    ({"index": INDEX[:, :4].contiguous()}, ValueError, "index has shape [2, 4], wanted [2, 5]"),
    ({"rng_keys": torch.arange(3)}, ValueError, "rng_keys has shape [3], wanted [2]"),
    ({"positions": torch.arange(2).int()}, TypeError, "positions is int32, wanted int64"),
    ({"k": 0}, ValueError, "k is 0 of a list of 5, wanted 1 <= k <= M <= 128: change k or the number of candidates"),
    ({"k": 6}, ValueError, "k is 6 of a list of 5, wanted 1 <= k <= M <= 128"),
    (
        {"logp": torch.zeros(2, 129), "index": torch.zeros(2, 129, dtype=torch.int64), "draft_to_target": None},
        ValueError,
        "k is 2 of a list of 129, wanted 1 <= k <= M <= 128",
    ),
    ({"draft_to_target": torch.arange(5).int()}, TypeError, "draft_to_target is int32, wanted int64"),
    (
        {"draft_to_target": torch.arange(4)},
        ValueError,
        "index names draft token 4, wanted 0 to 3: draft_to_target must hold the whole draft vocabulary",
    ),
]
WRONG_VERIFY = WRONG_PARAMS + [
    (tree(parents=torch.zeros(2, 1)), TypeError, "parents is float32, wanted int32"),
    ({"logits": torch.zeros(2, 9).double()}, TypeError, "logits is float64, wanted float32"),
    ({"logits": torch.zeros(3, 9)}, ValueError, "logits has shape [3, 9], wanted [2, *]"),
    (
        {"logits": torch.zeros(2, 0)},
        ValueError,
        "logits has a vocabulary of 0, wanted 1 to 2^31 - 1: pass",
    ),
    ({"rng_keys": torch.arange(3)}, ValueError, "rng_keys has shape [3], wanted [2]"),
    ({"lengths": torch.arange(2).int()}, TypeError, "lengths is int32, wanted int64"),
    ({"max_accept_length": 0}, ValueError, "max_accept_length is 0, wanted at least 1: the bonus token needs a place"),
    ({"filters": "both"}, ValueError, "filters is 'both', wanted 'joint' (SGLang's meaning) or 'chained' (vLLM's)"),
]


def refuse(call: Any, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    changes, error, sentence = wrong
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("wrong", WRONG_PROPOSE, ids=lambda wrong: wrong[2][:40])
def test_propose(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    propose()
    refuse(propose, wrong)


@pytest.mark.parametrize("wrong", WRONG_VERIFY, ids=lambda wrong: wrong[2][:40])
def test_verify_tree(path: str, wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    verify()
    refuse(verify, wrong)


def test_a_tree_without_a_root(path: str) -> None:
    nothing = DraftTree(*(values[:, :0] for values in tree()["tree"]))
    with pytest.raises(ValueError, match="tokens has 0 nodes per request, wanted at least the root: add node 0"):
        verify(tree=nothing, logits=torch.zeros(0, 9))


def test_uniforms(path: str) -> None:
    keys = torch.arange(3)
    assert sampling.uniforms(keys, keys, 1, 2).shape == (3, 2)
    with pytest.raises(TypeError, match="rng_keys is int32, wanted int64"):
        sampling.uniforms(keys.int(), keys, 1, 2)
    with pytest.raises(ValueError, match=r"counters has shape \[2\], wanted \[3\]"):
        sampling.uniforms(keys, keys[:2], 1, 2)
