"""25 architectures of other people, small, with random weights: no file is downloaded.

They come from transformers, timm, peft and diffusers, whose versions are in constraints/models.txt.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ARCHITECTURES", "Architecture"]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a model and its inputs are made; both draw from torch's generator.

    inductor: whether the suite also compiles it with Inductor, which takes a minute or so. but: a
    backend on which a check cannot agree, and what it has to say there.
    """

    model: Callable[[], torch.nn.Module]
    inputs: Callable[[], Inputs]
    inductor: bool = False
    but: Mapping[str, str] = field(default_factory=dict)


def _ids(columns: int = 12) -> torch.Tensor:
    return torch.randint(0, 64, (2, columns))


def _image(size: int = 32, *, count: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, size, size)


def _transformers(name: str, head: str, **config: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        library = _package("transformers")
        model: torch.nn.Module = getattr(library, head)(getattr(library, f"{name}Config")(**config))
        return model

    return make


def _timm(name: str, **options: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        model: torch.nn.Module = _package("timm").create_model(name, num_classes=10, **options)
        return model

    return make


def _diffusers(name: str, **options: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        model: torch.nn.Module = getattr(_package("diffusers"), name)(**options)
        return model

    return make


def _lora() -> torch.nn.Module:
    peft = _package("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM")
    model: torch.nn.Module = peft.get_peft_model(_GPT2(), config)
    return model


def _package(name: str) -> Any:
    """Import a package, after torchvision, which all of them import."""
    _torchvision()
    return importlib.import_module(name)


def _torchvision() -> None:
    """Import torchvision. Beside a CPU torch, its compiled part may not load: declare its ops."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        align = (
            "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
            "int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
        )
        for schema in (f"nms{boxes}", f"qnms{boxes}", f"roi_align{align}"):
            library.define(schema)
        _KEPT.append(library)
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []  # a library that is collected takes its ops along


def _masked() -> Inputs:
    mask = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    return (_ids(),), {"attention_mask": mask, "labels": _ids()}


def _text() -> Inputs:
    return (_ids(),), {"labels": _ids(), "use_cache": False}


def _pair() -> Inputs:
    return (_ids(),), {"labels": _ids()}


def _classes(given: Callable[[], torch.Tensor]) -> Callable[[], Inputs]:
    return lambda: ((given(),), {"labels": torch.tensor([0, 1])})


def _alone(size: int = 32) -> Callable[[], Inputs]:
    return lambda: ((_image(size),), {})


_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_SMALL = {"vocab_size": 64, "hidden_size": 32, **_LAYERS}
_PATCHES = {"hidden_size": 32, **_LAYERS, "image_size": 32, "patch_size": 8}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_GPT2 = _transformers(
    "GPT2", "GPT2LMHeadModel", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32
)
_WHISPER = {
    "vocab_size": 64,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "num_mel_bins": 8,
    "max_source_positions": 30,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_WAV2VEC = {
    "vocab_size": 16,
    "hidden_size": 32,
    **_LAYERS,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
}
_UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
_VAE = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "norm_num_groups": 4,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture(
        _transformers("Bert", "BertForMaskedLM", **_SMALL, max_position_embeddings=32),
        _masked,
        inductor=True,
    ),
    "gpt2": Architecture(_GPT2, _text, inductor=True),
    "llama": Architecture(
        _transformers("Llama", "LlamaForCausalLM", **_GROUPED), _text, inductor=True
    ),
    "qwen3": Architecture(
        _transformers("Qwen3", "Qwen3ForCausalLM", **_GROUPED, head_dim=8), _text
    ),
    "gemma2": Architecture(
        _transformers("Gemma2", "Gemma2ForCausalLM", **_GROUPED, head_dim=8), _text
    ),
    "mixtral": Architecture(
        _transformers("Mixtral", "MixtralForCausalLM", **_GROUPED, num_local_experts=4),
        _text,
        but={
            "fake-cuda": "Torch not compiled with CUDA enabled",  # for the compute capability
            "compile[aot_eager]": "no shadow could follow",  # torch's `_grouped_mm`
        },
    ),
    "t5": Architecture(
        _transformers(
            "T5",
            "T5ForConditionalGeneration",
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _pair,
        inductor=True,
    ),
    "mamba": Architecture(
        _transformers(
            "Mamba",
            "MambaForCausalLM",
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
        ),
        _text,
    ),
    "deberta": Architecture(
        _transformers(
            "DebertaV2",
            "DebertaV2ForSequenceClassification",
            **_SMALL,
            max_position_embeddings=32,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        _classes(_ids),
        but={"fake-cuda": "aten.nonzero"},
    ),
    "vit": Architecture(
        _transformers("ViT", "ViTForImageClassification", **_PATCHES),
        _classes(_image),
        inductor=True,
    ),
    "clip": Architecture(
        _transformers(
            "CLIP",
            "CLIPModel",
            text_config={**_SMALL, "max_position_embeddings": 16},
            vision_config=_PATCHES,
        ),
        lambda: ((_ids(), _image()), {"return_loss": True}),
    ),
    "whisper": Architecture(
        _transformers("Whisper", "WhisperForConditionalGeneration", **_WHISPER),
        lambda: ((torch.randn(2, 8, 60),), {"labels": _ids()}),
        inductor=True,
    ),
    "wav2vec2": Architecture(
        _transformers("Wav2Vec2", "Wav2Vec2ForCTC", **_WAV2VEC),
        lambda: ((torch.randn(2, 400),), {"labels": torch.randint(1, 16, (2, 5))}),
        but={"fake-cuda": "aten._local_scalar_dense"},
    ),
    "swin": Architecture(
        _transformers(
            "Swin",
            "SwinForImageClassification",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
        ),
        _classes(_image),
    ),
    "segformer": Architecture(
        _transformers("Segformer", "SegformerForSemanticSegmentation", **_SEGFORMER),
        lambda: ((_image(),), {"labels": torch.randint(0, 2, (2, 32, 32))}),
    ),
    "lora-gpt2": Architecture(_lora, _text),
    "resnet": Architecture(_timm("resnet18"), _alone(), inductor=True),
    "efficientnet": Architecture(_timm("efficientnet_b0"), _alone()),
    "convnext": Architecture(_timm("convnext_atto"), _alone()),
    "timm-vit": Architecture(_timm("vit_tiny_patch16_224", img_size=32, depth=2), _alone()),
    "mobilenet": Architecture(_timm("mobilenetv3_small_050"), _alone()),
    "coatnet": Architecture(_timm("coatnet_nano_rw_224", img_size=64), _alone(64)),
    "sd-unet": Architecture(
        _diffusers("UNet2DConditionModel", **_UNET),
        lambda: (
            (_image(8, channels=4), torch.tensor([3, 7]), torch.randn(2, 5, 16)),
            {},
        ),
        inductor=True,
    ),
    "vae": Architecture(
        _diffusers("AutoencoderKL", **_VAE),
        lambda: ((_image(16, count=1),), {}),
        # A bug of torch 2.13, without autocast too: the backward pass of a group norm raises where
        # the one image of its input is a transposed view.
        but={"compile[aot_eager]": "Expected X.is_contiguous(memory_format) to be true"},
    ),
    "dit": Architecture(
        _diffusers("DiTTransformer2DModel", **_DIT),
        lambda: (
            (_image(8, channels=4), torch.tensor([3, 7]), torch.tensor([1, 2])),
            {},
        ),
    ),
}
