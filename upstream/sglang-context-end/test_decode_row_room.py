import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.mem_cache import allocation_sizing
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class TestDecodeRowRoom(unittest.TestCase):
    def room_and_reserve(self, page_size, steps, topk, draft_tokens):
        spec = SimpleNamespace(
            speculative_algorithm="EAGLE3",
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
        )
        with patch.multiple(
            allocation_sizing,
            get_spec=lambda: spec,
            get_schedule=lambda: SimpleNamespace(page_size=page_size),
            get_parallel=lambda: SimpleNamespace(attn_dcp_size=1),
            max_speculative_num_draft_tokens=lambda: draft_tokens,
        ):
            return (
                allocation_sizing.get_req_to_token_extra_context_len(),
                allocation_sizing.get_alloc_reserve_per_decode(),
            )

    def test_row_holds_what_a_step_reserves_at_the_end_of_the_context(self):
        for page_size in (1, 16):
            for shape in ((5, 4, 8), (3, 4, 16), (2, 4, 8), (3, 1, 4)):
                with self.subTest(page_size=page_size, shape=shape):
                    room, reserve = self.room_and_reserve(page_size, *shape)
                    self.assertGreaterEqual(room, reserve)


if __name__ == "__main__":
    unittest.main()
