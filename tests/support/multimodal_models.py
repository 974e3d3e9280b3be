"""Tiny random multimodal targets, as they lie on the hub: a language model of `family_models` inside a class that takes
images, with a tokenizer and an image processor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from family_models import CHANGES, VOCAB, let_speak, spoken
from PIL import Image
from tiny_checkpoints import read_config, write_config, write_tokenizer
from tiny_targets import ARCHITECTURES, BASE, draw_weights

# Tokens that stand for images in the prompt, after those of the tokenizer; families name them differently.
OF_MISTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
MARKS = (
    "image",
    "image_start",
    "image_end",
    *OF_MISTRAL,
    "image_pad",
    "video_pad",
    "vision_start",
    "vision_end",
    "audio",
)
IDS = {name: VOCAB + i for i, name in enumerate(MARKS)}
ALL_TOKENS = VOCAB + 16
SIDE = 16  # pixels of an image's patch and of its neighbours that make one token together
QWEN_IDS = {
    "image_token_id": IDS["image_pad"],
    "video_token_id": IDS["video_pad"],
    "vision_start_token_id": IDS["vision_start"],
    "vision_end_token_id": IDS["vision_end"],
}
# deepstack_visual_indexes is empty in Qwen3.5 on the hub; SGLang takes three layers where the key is missing.
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": BASE["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": SIDE // 2,
}


def _rotary(*sections: int, **more: float) -> dict[str, Any]:
    """Rotary positions of three axes; sections: pairs of a head's dimensions that turn by each axis."""
    kind = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    return {"rope_parameters": kind | {"mrope_section": list(sections)} | more}


# By the model_type of transformers: the family of the language model, what of it differs, and the rest of the config.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama4": (
        "llama4_text",
        {},
        {
            "image_token_index": IDS["image"],
            "boi_token_index": IDS["image_start"],
            "eoi_token_index": IDS["image_end"],
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 128,  # four tokens of a picture become one
                "vision_output_dim": 32,
                "image_size": 4 * SIDE,
                "patch_size": SIDE,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
    "gemma4": (
        "gemma4_text",
        {},
        {
            "image_token_id": IDS["image"],
            "boi_token_id": IDS["image_start"],
            "eoi_token_id": IDS["image_end"],
            "video_token_id": IDS["video_pad"],
            "audio_token_id": IDS["audio"],
            "audio_config": None,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
        },
    ),
    "mistral3": (
        "llama",
        {"model_type": "mistral", "sliding_window": None},
        {
            "image_token_index": IDS["[IMG]"],
            "spatial_merge_size": 2,
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "image_size": 4 * SIDE,
                "patch_size": SIDE // 2,
            },
        },
    ),
    "qwen3_5": (
        "qwen3_next",
        {"model_type": "qwen3_5_text"} | _rotary(2, 1, 1, partial_rotary_factor=0.25),
        QWEN_IDS | {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": []}},
    ),
    "qwen3_5_moe": (
        "qwen3_next",
        {"model_type": "qwen3_5_moe_text"} | _rotary(2, 1, 1, partial_rotary_factor=0.25),
        QWEN_IDS | {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": []}},
    ),
    "qwen3_vl": (
        "qwen3",
        _rotary(6, 5, 5),
        QWEN_IDS | {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]}},
    ),
}
TEXT_ONLY = {"image": 0, "video": 0, "audio": 0}  # limits of inputs per prompt


def multimodal_target(folder: Path, kind: str, seed: int = 0, **options: Any) -> Path:
    """Write a target that says as many tokens as those of `family_models`, in float32.

    options: of the language model's configuration.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    family, changes, rest = KINDS[kind]
    printable = write_tokenizer(folder, VOCAB)
    sizes = {"vocab_size": ALL_TOKENS, "head_dim": 32, "max_position_embeddings": 1024}
    text = {**BASE, **ARCHITECTURES[family], **sizes, **CHANGES[family], **changes, **options}
    config = AutoConfig.for_model(kind, text_config=text, **rest)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float().eval()
        draw_weights(model)
    let_speak(model, family, spoken(printable))
    model.save_pretrained(folder)
    written = read_config(folder)
    write_config(folder, **written | {"text_config": CHANGES[family] | written["text_config"]})
    _write_processor(folder, kind)
    return folder


def _write_processor(folder: Path, kind: str) -> None:
    """The files by which an engine turns prompts and pictures into tokens and patches.

    Llama 4 and Gemma 4 get none for pictures: vLLM cannot run the vision tower of the first on a CPU, and the processor
    of the second wants libraries for sound. That of Qwen wants torchvision.
    """
    import transformers
    from tokenizers import AddedToken, Tokenizer

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.add_special_tokens([AddedToken(mark(name), special=True) for name in MARKS])
    tokenizer.save(path)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    if kind == "mistral3":
        images = transformers.PixtralImageProcessor(patch_size=SIDE // 2, size={"longest_edge": 4 * SIDE})
        transformers.PixtralProcessor(images, loaded, SIDE // 2, spatial_merge_size=2).save_pretrained(folder)
    elif kind.startswith("qwen") and find_spec("torchvision"):
        sizes = {"patch_size": SIDE // 2, "size": {"shortest_edge": SIDE**2, "longest_edge": 16 * SIDE**2}}
        images, videos = transformers.Qwen2VLImageProcessor(**sizes), transformers.Qwen3VLVideoProcessor(**sizes)
        transformers.Qwen3VLProcessor(images, loaded, videos).save_pretrained(folder)


def mark(name: str) -> str:
    """The text of a token of MARKS."""
    return name if name in OF_MISTRAL else f"<|{name}|>"


# What stands for a picture in a prompt; targets of the other kinds are asked for text alone.
OF_QWEN = mark("vision_start") + mark("image_pad") + mark("vision_end")
PLACES = {"qwen3_vl": OF_QWEN, "qwen3_5": OF_QWEN, "qwen3_5_moe": OF_QWEN, "mistral3": mark("[IMG]")}


def picture(number: int, size: tuple[int, int] = (4 * SIDE, 4 * SIDE)) -> Image.Image:
    """A picture of random squares."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.NEAREST)
