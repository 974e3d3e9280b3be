"""The real model, downloaded and converted once into the user's cache: about 93 MB on the first run."""

import json

import pytest
import torch
from safetensors import safe_open

from eagle_plugin.models import get_model


@pytest.fixture(scope="module")
def folder():
    return get_model("smollm2-135m-instruct")


def test_config_is_smollm2s(folder):
    config = json.loads((folder / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {key: config.get(key) for key in wanted} == wanted
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_weights_are_bf16_and_tied(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert len(names) == 30 * 9 + 2 and "lm_head.weight" not in names
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}


def test_tokenizer_speaks_chatml(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  there\n\t1234"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi  there\n\t1234<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert tokenizer.decode(ids) == text
    assert "SmolLM" in tokenizer.apply_chat_template(turns[1:], tokenize=False)  # the model's own system prompt


def test_answers_and_stops(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.bfloat16
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id
