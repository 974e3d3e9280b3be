"""In bfloat16 on a CPU with our linear layers, the text does not depend on the shapes of the trees, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import accept_length, generate_all, responses, serving, tiny_spec

pytest.importorskip("sglang")
from eagle_plugin.kernels import bf16_linear
from eagle_plugin.models.store import get_model

pytestmark = pytest.mark.server

HEAD = Path(__file__).resolve().parents[3] / "examples/heads/smollm2-135m-instruct-eagle3"
PROMPTS = [
    "The river behind the old mill was", "def merge(first, second):", "In 1905, a clerk in Bern", "Once upon a time,",
    "The three laws of thermodynamics are", "To cook rice, first",
]  # fmt: skip


@pytest.mark.skipif(bf16_linear.native_kernel() is None, reason="this CPU has no AVX-512 BF16, or has AMX")
def test_random_shapes_change_no_text(tmp_path: Path) -> None:
    """Shapes from one token to 16 nodes, other ones in each of three runs; torch's layers changed 3 of 6 texts."""
    spec = tiny_spec(
        get_model("smollm2-135m-instruct"),
        HEAD,
        (3, 4, 16),
        dtype="bfloat16",
        environment={"EAGLE_POLICY": "random"},
        extra_flags=("--skip-server-warmup", "--disable-radix-cache"),
    )
    with serving([spec], tmp_path) as (server,):
        answers = [generate_all(server, PROMPTS, 64, at_once=1) for _ in range(3)]
    rounds = [[answer["meta_info"]["spec_verify_ct"] for answer in run] for run in answers]
    assert rounds[0] != rounds[1] != rounds[2]
    assert all(accept_length(run) > 1.2 for run in answers)
    assert responses(answers[0]) == responses(answers[1]) == responses(answers[2])
