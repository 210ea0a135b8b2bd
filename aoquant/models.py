"""The table of short names: the repositories of the pipelines that people quantize, and what is in them.

Each row is an organization's own repository of a pipeline in the diffusers layout; where an organization has none, the
one that the diffusers documentation loads. Nothing here asks the Hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = "aoquant.models/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One repository. Its name is the part of `repo_id` after the slash; `also` are other names for it.

    pipeline: the class that its model_index.json names. components: those worth quantizing, name → class, in the order
    of the pipeline's constructor: its transformers, UNets and text encoders. meaning: what it is, in a phrase.
    """

    repo_id: str
    pipeline: str
    components: Mapping[str, str]
    meaning: str
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.repo_id.partition("/")[2]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All that it may be called."""
        return (self.name, *self.also)


def _t5(transformer: str) -> dict[str, str]:
    return {"text_encoder": "T5EncoderModel", "transformer": transformer}


_FLUX = {"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel", "transformer": "FluxTransformer2DModel"}
_FLUX_2 = {"text_encoder": "Mistral3ForConditionalGeneration", "transformer": "Flux2Transformer2DModel"}
_FLUX_2_KLEIN = {"text_encoder": "Qwen3ForCausalLM", "transformer": "Flux2Transformer2DModel"}
_SD = {"text_encoder": "CLIPTextModel", "unet": "UNet2DConditionModel"}
_SDXL = {
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "unet": "UNet2DConditionModel",
}
_SD3 = {
    "transformer": "SD3Transformer2DModel",
    "text_encoder": "CLIPTextModelWithProjection",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "text_encoder_3": "T5EncoderModel",
}
_QWEN = {"text_encoder": "Qwen2_5_VLForConditionalGeneration", "transformer": "QwenImageTransformer2DModel"}
_Z_IMAGE = {"text_encoder": "Qwen3Model", "transformer": "ZImageTransformer2DModel"}
_WAN = {"text_encoder": "UMT5EncoderModel", "transformer": "WanTransformer3DModel"}
_WAN_PAIR = {**_WAN, "transformer_2": "WanTransformer3DModel"}
_HUNYUAN_VIDEO_15 = {
    "text_encoder": "Qwen2_5_VLTextModel",
    "transformer": "HunyuanVideo15Transformer3DModel",
    "text_encoder_2": "T5EncoderModel",
}
_HUNYUAN_IMAGE = {
    "text_encoder": "Qwen2_5_VLForConditionalGeneration",
    "text_encoder_2": "T5EncoderModel",
    "transformer": "HunyuanImageTransformer2DModel",
}
_LTX = _t5("LTXVideoTransformer3DModel")
_COGVIDEOX = _t5("CogVideoXTransformer3DModel")
_PIXART = _t5("PixArtTransformer2DModel")
_CHROMA = _t5("ChromaTransformer2DModel")
_SANA = {"text_encoder": "Gemma2Model", "transformer": "SanaTransformer2DModel"}
_AURA_FLOW = {"text_encoder": "UMT5EncoderModel", "transformer": "AuraFlowTransformer2DModel"}
# Its fourth encoder, a Llama, is no part of the repository.
_HIDREAM = {
    "text_encoder": "CLIPTextModelWithProjection",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "text_encoder_3": "T5EncoderModel",
    "transformer": "HiDreamImageTransformer2DModel",
}

_ROWS = (
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-dev",
        also=("flux-dev",),
        pipeline="FluxPipeline",
        components=_FLUX,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-schnell",
        also=("flux-schnell",),
        pipeline="FluxPipeline",
        components=_FLUX,
        meaning="text to image in few steps",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-Krea-dev",
        also=("flux-krea-dev",),
        pipeline="FluxPipeline",
        components=_FLUX,
        meaning="text to image, tuned for natural looks",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-Kontext-dev",
        also=("flux-kontext-dev",),
        pipeline="FluxKontextPipeline",
        components=_FLUX,
        meaning="editing of an image by words",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-Fill-dev",
        also=("flux-fill-dev",),
        pipeline="FluxFillPipeline",
        components=_FLUX,
        meaning="inpainting and outpainting",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-Canny-dev",
        also=("flux-canny-dev",),
        pipeline="FluxControlPipeline",
        components=_FLUX,
        meaning="text to image along given edges",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.1-Depth-dev",
        also=("flux-depth-dev",),
        pipeline="FluxControlPipeline",
        components=_FLUX,
        meaning="text to image along a given depth map",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.2-dev",
        also=("flux2-dev",),
        pipeline="Flux2Pipeline",
        components=_FLUX_2,
        meaning="text to image, editing by words",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.2-klein-4B",
        also=("flux2-klein-4b",),
        pipeline="Flux2KleinPipeline",
        components=_FLUX_2_KLEIN,
        meaning="text to image, editing; 4B, few steps",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.2-klein-9B",
        also=("flux2-klein-9b",),
        pipeline="Flux2KleinPipeline",
        components=_FLUX_2_KLEIN,
        meaning="text to image, editing; 9B, few steps",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.2-klein-base-4B",
        also=("flux2-klein-base-4b",),
        pipeline="Flux2KleinPipeline",
        components=_FLUX_2_KLEIN,
        meaning="text to image, editing; 4B, not distilled",
    ),
    ModelRow(
        repo_id="black-forest-labs/FLUX.2-klein-base-9B",
        also=("flux2-klein-base-9b",),
        pipeline="Flux2KleinPipeline",
        components=_FLUX_2_KLEIN,
        meaning="text to image, editing; 9B, not distilled",
    ),
    ModelRow(
        repo_id="stable-diffusion-v1-5/stable-diffusion-v1-5",
        also=("sd1.5", "sd-1.5"),
        pipeline="StableDiffusionPipeline",
        components=_SD,
        meaning="text to image, 512 pixels",
    ),
    ModelRow(
        repo_id="stabilityai/stable-diffusion-xl-base-1.0",
        also=("sdxl", "sdxl-base", "sdxl-base-1.0"),
        pipeline="StableDiffusionXLPipeline",
        components=_SDXL,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="stabilityai/stable-diffusion-xl-refiner-1.0",
        also=("sdxl-refiner", "sdxl-refiner-1.0"),
        pipeline="StableDiffusionXLImg2ImgPipeline",
        components={"text_encoder_2": "CLIPTextModelWithProjection", "unet": "UNet2DConditionModel"},
        meaning="the last steps of an SDXL image",
    ),
    ModelRow(
        repo_id="stabilityai/sdxl-turbo",
        pipeline="StableDiffusionXLPipeline",
        components=_SDXL,
        meaning="text to image in one step",
    ),
    ModelRow(
        repo_id="stabilityai/stable-diffusion-3-medium-diffusers",
        also=("stable-diffusion-3-medium", "sd3", "sd3-medium"),
        pipeline="StableDiffusion3Pipeline",
        components=_SD3,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="stabilityai/stable-diffusion-3.5-medium",
        also=("sd3.5-medium",),
        pipeline="StableDiffusion3Pipeline",
        components=_SD3,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="stabilityai/stable-diffusion-3.5-large",
        also=("sd3.5-large",),
        pipeline="StableDiffusion3Pipeline",
        components=_SD3,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="stabilityai/stable-diffusion-3.5-large-turbo",
        also=("sd3.5-large-turbo",),
        pipeline="StableDiffusion3Pipeline",
        components=_SD3,
        meaning="text to image in few steps",
    ),
    ModelRow(
        repo_id="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        components=_QWEN,
        meaning="text to image, strong at rendering text",
    ),
    ModelRow(
        repo_id="Qwen/Qwen-Image-2512",
        pipeline="QwenImagePipeline",
        components=_QWEN,
        meaning="text to image, of December 2025",
    ),
    ModelRow(
        repo_id="Qwen/Qwen-Image-Edit",
        pipeline="QwenImageEditPipeline",
        components=_QWEN,
        meaning="editing of an image by words",
    ),
    ModelRow(
        repo_id="Qwen/Qwen-Image-Edit-2509",
        pipeline="QwenImageEditPlusPipeline",
        components=_QWEN,
        meaning="editing of one or more images, of September 2025",
    ),
    ModelRow(
        repo_id="Qwen/Qwen-Image-Edit-2511",
        pipeline="QwenImageEditPlusPipeline",
        components=_QWEN,
        meaning="editing of one or more images, of November 2025",
    ),
    ModelRow(
        repo_id="Tongyi-MAI/Z-Image",
        pipeline="ZImagePipeline",
        components=_Z_IMAGE,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="Tongyi-MAI/Z-Image-Turbo",
        pipeline="ZImagePipeline",
        components=_Z_IMAGE,
        meaning="text to image in few steps",
    ),
    ModelRow(
        repo_id="lodestones/Chroma1-HD",
        pipeline="ChromaPipeline",
        components=_CHROMA,
        meaning="text to image, made from FLUX.1-schnell",
    ),
    ModelRow(
        repo_id="lodestones/Chroma1-Base",
        pipeline="ChromaPipeline",
        components=_CHROMA,
        meaning="text to image, to be tuned further",
    ),
    ModelRow(
        repo_id="HiDream-ai/HiDream-I1-Full",
        pipeline="HiDreamImagePipeline",
        components=_HIDREAM,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="HiDream-ai/HiDream-I1-Dev",
        pipeline="HiDreamImagePipeline",
        components=_HIDREAM,
        meaning="text to image, distilled",
    ),
    ModelRow(
        repo_id="HiDream-ai/HiDream-I1-Fast",
        pipeline="HiDreamImagePipeline",
        components=_HIDREAM,
        meaning="text to image in few steps",
    ),
    ModelRow(
        repo_id="hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
        also=("HunyuanImage-2.1",),
        pipeline="HunyuanImagePipeline",
        components=_HUNYUAN_IMAGE,
        meaning="text to image, 2048 pixels",
    ),
    ModelRow(
        repo_id="hunyuanvideo-community/HunyuanImage-2.1-Distilled-Diffusers",
        also=("HunyuanImage-2.1-Distilled",),
        pipeline="HunyuanImagePipeline",
        components=_HUNYUAN_IMAGE,
        meaning="text to image in few steps, 2048 pixels",
    ),
    ModelRow(
        repo_id="PixArt-alpha/PixArt-XL-2-1024-MS",
        also=("pixart-alpha",),
        pipeline="PixArtAlphaPipeline",
        components=_PIXART,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        also=("pixart-sigma",),
        pipeline="PixArtSigmaPipeline",
        components=_PIXART,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        also=("Sana_1600M_1024px", "sana-1600m"),
        pipeline="SanaPipeline",
        components=_SANA,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="Efficient-Large-Model/Sana_600M_1024px_diffusers",
        also=("Sana_600M_1024px", "sana-600m"),
        pipeline="SanaPipeline",
        components=_SANA,
        meaning="text to image, small",
    ),
    ModelRow(
        repo_id="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        also=("SANA1.5_1.6B_1024px", "sana1.5-1.6b"),
        pipeline="SanaPipeline",
        components=_SANA,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
        also=("SANA1.5_4.8B_1024px", "sana1.5-4.8b"),
        pipeline="SanaPipeline",
        components=_SANA,
        meaning="text to image, large",
    ),
    ModelRow(
        repo_id="Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",
        also=("Sana_Sprint_1.6B_1024px", "sana-sprint-1.6b"),
        pipeline="SanaSprintPipeline",
        components=_SANA,
        meaning="text to image in one to four steps",
    ),
    ModelRow(
        repo_id="fal/AuraFlow",
        pipeline="AuraFlowPipeline",
        components=_AURA_FLOW,
        meaning="text to image",
    ),
    ModelRow(
        repo_id="fal/AuraFlow-v0.3",
        pipeline="AuraFlowPipeline",
        components=_AURA_FLOW,
        meaning="text to image, the latest AuraFlow",
    ),
    ModelRow(
        repo_id="Alpha-VLLM/Lumina-Image-2.0",
        also=("lumina2",),
        pipeline="Lumina2Pipeline",
        components={"transformer": "Lumina2Transformer2DModel", "text_encoder": "Gemma2Model"},
        meaning="text to image",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        also=("Wan2.1-T2V-1.3B",),
        pipeline="WanPipeline",
        components=_WAN,
        meaning="text to video, small",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        also=("Wan2.1-T2V-14B",),
        pipeline="WanPipeline",
        components=_WAN,
        meaning="text to video",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        also=("Wan2.1-I2V-14B-480P",),
        pipeline="WanImageToVideoPipeline",
        components=_WAN,
        meaning="image to video, 480 lines",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        also=("Wan2.1-I2V-14B-720P",),
        pipeline="WanImageToVideoPipeline",
        components=_WAN,
        meaning="image to video, 720 lines",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        also=("Wan2.2-T2V-A14B",),
        pipeline="WanPipeline",
        components=_WAN_PAIR,
        meaning="text to video, two experts",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        also=("Wan2.2-I2V-A14B",),
        pipeline="WanImageToVideoPipeline",
        components=_WAN_PAIR,
        meaning="image to video, two experts",
    ),
    ModelRow(
        repo_id="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        also=("Wan2.2-TI2V-5B",),
        pipeline="WanPipeline",
        components=_WAN,
        meaning="text or image to video, small",
    ),
    ModelRow(
        repo_id="hunyuanvideo-community/HunyuanVideo",
        pipeline="HunyuanVideoPipeline",
        components={
            "text_encoder": "LlamaModel",
            "transformer": "HunyuanVideoTransformer3DModel",
            "text_encoder_2": "CLIPTextModel",
        },
        meaning="text to video",
    ),
    ModelRow(
        repo_id="hunyuanvideo-community/HunyuanVideo-I2V",
        pipeline="HunyuanVideoImageToVideoPipeline",
        components={
            "text_encoder": "LlavaForConditionalGeneration",
            "transformer": "HunyuanVideoTransformer3DModel",
            "text_encoder_2": "CLIPTextModel",
        },
        meaning="image to video",
    ),
    ModelRow(
        repo_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        also=("HunyuanVideo-1.5-480p_t2v",),
        pipeline="HunyuanVideo15Pipeline",
        components=_HUNYUAN_VIDEO_15,
        meaning="text to video, 480 lines",
    ),
    ModelRow(
        repo_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        also=("HunyuanVideo-1.5-720p_t2v",),
        pipeline="HunyuanVideo15Pipeline",
        components=_HUNYUAN_VIDEO_15,
        meaning="text to video, 720 lines",
    ),
    ModelRow(
        repo_id="Lightricks/LTX-Video",
        pipeline="LTXPipeline",
        components=_LTX,
        meaning="text to video, 2B",
    ),
    ModelRow(
        repo_id="Lightricks/LTX-Video-0.9.7-dev",
        pipeline="LTXConditionPipeline",
        components=_LTX,
        meaning="text, image or video to video, 13B",
    ),
    ModelRow(
        repo_id="Lightricks/LTX-Video-0.9.8-13B-distilled",
        pipeline="LTXConditionPipeline",
        components=_LTX,
        meaning="text, image or video to video in few steps, 13B",
    ),
    ModelRow(
        repo_id="Lightricks/LTX-2",
        pipeline="LTX2Pipeline",
        components={
            "text_encoder": "Gemma3ForConditionalGeneration",
            "transformer": "LTX2VideoTransformer3DModel",
        },
        meaning="text to video with sound",
    ),
    ModelRow(
        repo_id="zai-org/CogVideoX-2b",
        pipeline="CogVideoXPipeline",
        components=_COGVIDEOX,
        meaning="text to video, small",
    ),
    ModelRow(
        repo_id="zai-org/CogVideoX-5b",
        pipeline="CogVideoXPipeline",
        components=_COGVIDEOX,
        meaning="text to video",
    ),
    ModelRow(
        repo_id="zai-org/CogVideoX-5b-I2V",
        pipeline="CogVideoXImageToVideoPipeline",
        components=_COGVIDEOX,
        meaning="image to video",
    ),
    ModelRow(
        repo_id="zai-org/CogVideoX1.5-5B",
        pipeline="CogVideoXPipeline",
        components=_COGVIDEOX,
        meaning="text to video, longer and larger",
    ),
    ModelRow(
        repo_id="genmo/mochi-1-preview",
        also=("mochi-1",),
        pipeline="MochiPipeline",
        components=_t5("MochiTransformer3DModel"),
        meaning="text to video",
    ),
)

MODELS: Mapping[str, ModelRow] = {row.name: row for row in _ROWS}

_BY_SPELLING = {spelling.casefold(): row for row in _ROWS for spelling in row.spellings}


def find_model(name: str) -> ModelRow | None:
    """The row that a bare name stands for, in whatever case it is written."""
    return _BY_SPELLING.get(name.casefold())


def models_json() -> dict[str, Any]:
    """The table as one JSON document."""
    return {
        "schema": SCHEMA,
        "models": [
            {
                "name": row.name,
                "aliases": list(row.also),
                "repo_id": row.repo_id,
                "pipeline": row.pipeline,
                "components": dict(row.components),
                "meaning": row.meaning,
            }
            for row in _ROWS
        ],
    }
