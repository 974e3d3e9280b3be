import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.speculative import eagle_utils
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

NUM_NODES = 2000


class TestCpuVerifySamples(unittest.TestCase):
    def target_tokens(self, logits, is_all_greedy=False, **params):
        """Tokens of the target at the nodes of one request, all with these logits."""
        sampling_info = SimpleNamespace(
            acc_additive_penalties=None,
            acc_scaling_penalties=None,
            logit_bias=None,
            has_watermark_candidates=False,
            is_all_greedy=is_all_greedy,
            temperatures=torch.tensor([[params.get("temperature", 1.0)]]),
            top_ks=torch.tensor([params.get("top_k", 1 << 30)]),
            top_ps=torch.tensor([params.get("top_p", 1.0)]),
            min_ps=torch.tensor([0.0]),
            need_min_p_sampling=False,
            sampling_seed=None,
        )
        verify_input = SimpleNamespace(
            draft_token=torch.zeros(NUM_NODES, dtype=torch.int64),
            draft_token_num=NUM_NODES,
            max_tree_depth=4,
            positions=torch.zeros(NUM_NODES, dtype=torch.int64),
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            tree_topk=4,
        )
        batch = SimpleNamespace(
            device="cpu",
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            seq_lens=torch.tensor([5]),
            sampling_info=sampling_info,
        )
        torch.manual_seed(0)
        group = SimpleNamespace(world_size=1)
        found = []

        def verify(*, predicts, accept_index, accept_token_num, **tree):
            found.append(tree["target_predict"])
            return predicts, accept_index, accept_token_num

        with (
            patch.multiple(
                eagle_utils,
                _is_cpu=True,
                verify_tree_greedy_func=verify,
                get_spec=lambda: SimpleNamespace(speculative_use_rejection_sampling=0),
            ),
            patch(
                "sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False
            ),
            patch(
                "sglang.srt.runtime_context.get_parallel",
                lambda: SimpleNamespace(tp_group=group),
            ),
        ):
            output = SimpleNamespace(
                next_token_logits=torch.tensor(logits).repeat(NUM_NODES, 1)
            )
            eagle_utils.eagle_sample(verify_input, batch, output)
        return found[0].flatten().bincount(minlength=len(logits)) / NUM_NODES

    def test_tokens_have_the_distribution_of_the_target(self):
        logits = [0.0, 1.0, -1.0]
        for temperature in (1.0, 0.5):
            expected = torch.softmax(torch.tensor(logits) / temperature, dim=-1)
            tokens = self.target_tokens(logits, temperature=temperature)
            torch.testing.assert_close(tokens, expected, atol=0.06, rtol=0)

    def test_top_k_and_top_p_are_read(self):
        logits = [0.0, 1.0, -1.0]
        for params in ({"top_k": 2}, {"top_p": 0.8}):
            tokens = self.target_tokens(logits, **params)
            self.assertEqual((tokens > 0).tolist(), [True, True, False])

    def test_greedy_requests_take_the_most_likely_token(self):
        for params in ({"is_all_greedy": True}, {"top_k": 1}):
            tokens = self.target_tokens([0.0, 1.0, -1.0], **params)
            self.assertEqual(tokens.tolist(), [0.0, 1.0, 0.0])


if __name__ == "__main__":
    unittest.main()
