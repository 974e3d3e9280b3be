"""Lets an EAGLE-2 head in SGLang read prompts with images: it embeds the token that stands for an image.

SGLang puts hashes of images into their places among the ids, beyond the vocabulary. Its EAGLE-3 class takes the
embeddings of the images in place of these; its EAGLE-2 class looks the hashes up, and the server ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def read_image_tokens(head: Any, model_config: Any) -> None:
    """Replace ids beyond the vocabulary before this head embeds them; model_config: SGLang's, of the target."""
    if type(head).__name__ != "LlamaForCausalLMEagle" or not model_config.is_multimodal:
        return
    embedding, token = head.model.embed_tokens, model_config.image_token_id or 0
    size = embedding.org_vocab_size

    def replace(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, *others = arguments
        return torch.where(ids < size, ids, token), *others

    embedding.register_forward_pre_hook(replace)
