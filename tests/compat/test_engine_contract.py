"""What the installed SGLang takes from sgl_kernel on a CPU, read from its source: new needs fail here."""

import ast
import inspect
from pathlib import Path

import pytest
import sgl_kernel
import torch

sglang = pytest.importorskip("sglang")
from eagle_sglang_cpu import hooks  # noqa: E402

ROOT = Path(sglang.__file__).parent
ATTENTION = ROOT / "srt/layers/attention/intel_amx_backend.py"
MURMUR = ROOT / "kernels/ops/sampling/murmur_hash.py"


def imported_on_cpu() -> set[str]:
    """Names of every `from sgl_kernel import x_cpu` in the serving engine, however deep."""
    names = set()
    for folder in ("srt", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            if "from sgl_kernel import" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom) and node.module == "sgl_kernel":
                    names |= {alias.name for alias in node.names if alias.name.endswith("_cpu")}
    return names


def ops_in(path: Path) -> set[str]:
    """Names x in every torch.ops.sgl_kernel.x of one file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.sgl_kernel":
            found.add(node.attr)
    return found


def call_of(path: Path, name: str) -> ast.Call:
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    (call,) = [c for c in calls if ast.unparse(c.func).split(".")[-1] == name]
    return call


def test_we_provide_exactly_the_names_that_the_engine_imports():
    assert set(sgl_kernel.__all__) == imported_on_cpu()
    assert all(callable(getattr(sgl_kernel, name)) for name in sgl_kernel.__all__)


def test_we_provide_the_operations_of_the_cpu_path():
    assert ops_in(ATTENTION) | ops_in(MURMUR) == {"decode_attention_cpu", "extend_attention_cpu", "murmur_hash32_cpu"}
    for name in ops_in(ATTENTION) | ops_in(MURMUR):
        assert hasattr(torch.ops.sgl_kernel, name)


@pytest.mark.parametrize(
    "method, op, in_order",
    [
        (
            "decode_attention_fwd",
            "decode_attention_cpu",
            {2: "value_buffer", 8: "cache_loc", 16: "layer.sliding_window_size + 1"},
        ),
        ("extend_attention_fwd", "extend_attention_cpu", {4: "key_buffer", 11: "extend_seq_lens", 20: "tree_mask"}),
    ],
)
def test_the_engine_calls_the_attention_operations_in_our_order(method, op, in_order):
    call = call_of(ATTENTION, method)
    assert not call.keywords
    assert len(call.args) == len(getattr(torch.ops.sgl_kernel, op).default._schema.arguments)
    for position, expression in in_order.items():
        assert ast.unparse(call.args[position]) == expression


@pytest.mark.parametrize(
    "file, name",
    [
        ("kernels/ops/kvcache/cache_move.py", "copy_all_layer_kv_cache_cpu"),
        ("kernels/ops/speculative/cache_locs.py", "assign_draft_cache_locs_contiguous_cpu"),
        ("kernels/ops/speculative/eagle.py", "fill_bonus_tokens_cpu"),
        ("kernels/ops/speculative/eagle.py", "fill_accept_out_cache_loc_cpu"),
        ("kernels/ops/speculative/multi_layer_eagle.py", "rotate_input_ids_cpu"),
        ("srt/mem_cache/allocation.py", "assign_req_to_token_pool_cpu"),
    ],
)
def test_the_engine_calls_our_functions_with_arguments_that_fit(file, name):
    call = call_of(ROOT / file, name)
    keywords = {keyword.arg: keyword for keyword in call.keywords}
    bound = inspect.signature(getattr(sgl_kernel, name)).bind(*call.args, **keywords)
    assert len(bound.arguments) == len(call.args) + len(keywords)


def test_the_tree_mask_mode_of_a_cpu_is_ours():
    from sgl_kernel.tree import QLEN_ONLY

    source = (ROOT / "srt/speculative/eagle_utils.py").read_text()
    assert "TreeMaskMode.QLEN_ONLY if _is_cpu else" in source
    assert f"QLEN_ONLY = {QLEN_ONLY}\n" in (ROOT / "kernels/ops/speculative/spec_tree.py").read_text()


def test_no_sign_of_amx():
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def definition_of(path: str) -> ast.FunctionDef:
    """The source of a function named by its dotted path, read without importing the engine."""
    module, _, name = path.rpartition(".")
    file = ROOT.parent / (module.replace(".", "/") + ".py")
    (found,) = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def test_hooked_functions_take_what_our_hooks_pass_on():
    assert [a.arg for a in definition_of(hooks.ATTENTION_FALLBACK).args.args] == ["view"]
    gather = [a.arg for a in definition_of(hooks.GATHER_SPEC_EXTRAS).args.args]
    assert gather == ["indices", "topk_p_buf", "topk_index_buf", "output_tokens_buf", "hidden_states_buf"]


@pytest.mark.parametrize("path", [hooks.SELECT_TOP_K, hooks.MULTINOMIAL_WITH_SEED])
def test_functions_that_we_run_uncompiled_are_still_compiled_by_the_engine(path):
    (decorator,) = definition_of(path).decorator_list
    assert ast.unparse(decorator).startswith("torch.compile(")


def test_the_fallback_is_called_through_its_name():
    # HookRegistry rewrites names in modules, not references kept in lists
    source = (ROOT / "srt/arg_groups/attention_hook.py").read_text()
    assert "run_post_process_pass(server_args, _attention_backend_platform_fallbacks)" in source
