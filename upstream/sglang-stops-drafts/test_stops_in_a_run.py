import unittest
from array import array

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

TEXT = "abcdef"


class CharTokenizer:
    eos_token_id = 0
    additional_stop_token_ids = None

    def encode(self, text, add_special_tokens=False):
        return [ord(char) for char in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class TestStopsInARun(unittest.TestCase):
    def finish(self, accept_len, max_new_tokens=32, **stops):
        """Reason and length of a request that accepts `accept_len` tokens per step."""
        params = SamplingParams(max_new_tokens=max_new_tokens, **stops)
        params.normalize(CharTokenizer())
        req = Req("0", "", array("q", [1]), params, vocab_size=256)
        req.tokenizer = CharTokenizer()
        for start in range(0, len(TEXT), accept_len):
            run = [ord(char) for char in TEXT[start : start + accept_len]]
            req.output_ids.extend(run)
            req.update_finish_state(len(run))
            if req.finished():
                return req.finished_reason.to_json(), req.finished_len
        return None

    def test_a_run_ends_where_single_tokens_end(self):
        for stops in (
            {"stop": ["e", "b"]},
            {"stop": ["cd", "bcde"]},
            {"stop": ["d"], "stop_token_ids": [ord("b")]},
            {"stop": ["e", "b"], "max_new_tokens": 3},
            {"stop": ["x"], "stop_regex": ["e", "[bc]"]},
            {"stop": ["x"], "max_new_tokens": 3},
            {"stop": ["x"]},
        ):
            with self.subTest(**stops):
                expected = self.finish(1, **stops)
                for accept_len in range(2, len(TEXT) + 1):
                    self.assertEqual(self.finish(accept_len, **stops), expected)

    def test_tokens_after_the_stop_stay_in_the_output(self):
        params = SamplingParams(stop=["b"])
        params.normalize(CharTokenizer())
        req = Req("0", "", array("q", [1]), params, vocab_size=256)
        req.tokenizer = CharTokenizer()
        req.output_ids.extend(map(ord, TEXT))
        req.update_finish_state(len(TEXT))
        self.assertEqual(req.finished_len, 2)
        self.assertEqual(req.tokenizer.decode(req.output_ids), TEXT)


if __name__ == "__main__":
    unittest.main()
