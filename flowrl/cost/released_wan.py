"""Architectures of the released Wan models.

Settings are facts of each repository's config.json files, by the names that diffusers and
transformers give them; what a class has by default, which is Wan 2.1 14B, is left out.
tests/cost/test_estimate_wan.py checks the parameters against the published numbers.
"""

from __future__ import annotations

from typing import Any

from flowrl.cost.pipeline_part import PipelinePart

UMT5_XXL = PipelinePart(
    "transformers",
    "UMT5EncoderModel",
    {
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    },
)
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}  # of 1.3B


def _wan(settings: dict[str, Any], *, shift: float, experts: int = 1) -> dict[str, PipelinePart]:
    transformer = {"text_dim": 4096, "rope_max_seq_len": 1024, **settings}
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    parts = {"transformer": PipelinePart("diffusers", "WanTransformer3DModel", transformer)}
    if experts > 1:
        parts["transformer_2"] = parts["transformer"]
    return {
        **parts,
        "scheduler": PipelinePart("diffusers", "UniPCMultistepScheduler", flow),
        "vae": PipelinePart("diffusers", "AutoencoderKLWan", {}),
        "text_encoder": UMT5_XXL,
    }


def released() -> dict[str, dict[str, PipelinePart]]:
    """Return the parts of each text-to-video model by its hub id."""
    return {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(SMALL, shift=3.0),
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan({}, shift=5.0),
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _wan({}, shift=3.0, experts=2),
    }
