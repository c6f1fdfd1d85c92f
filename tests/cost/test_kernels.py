"""What a device does in an iteration, told from the names of its kernels."""

from __future__ import annotations

import pytest
import torch

from flowrl.cost.kernels import Kernel, KernelWatch, group_of, kernels_table, summary

# as PyTorch 2.11 named them on an H200: assets/results/performance-queue.json
SEEN = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bf>": "attention",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>": "copies",
    "void at::native::vectorized_elementwise_kernel<8, bfloat16_copy_kernel_cuda>": "copies",
    "Memset (Device)": "copies",
    "void at::native::reduce_kernel<512, 1, MeanOps<float, float, float>>": "element by element",
    "void at::native::elementwise_kernel<128, 4, MulFunctor<float>>": "element by element",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>": "norms",
    "triton_poi_fused_add_mul_3": "compiled",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "collectives",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>": "other",
}


@pytest.mark.parametrize(("name", "group"), SEEN.items())
def test_kernels_are_told_apart_by_their_names(name: str, group: str) -> None:
    assert group_of(name) == group


def test_groups_add_up_beside_the_time_without_a_profiler() -> None:
    kernels = [Kernel("gemm", 2.0, 3), Kernel("nvjet", 1.0, 1), Kernel("Memset", 0.5, 2)]
    found = summary(kernels, 5.0)
    assert found["groups"]["products"] == {"seconds": 3.0, "calls": 4}
    assert found["busy"] == 0.7 and found["calls"] == 6
    assert [one["name"] for one in found["longest"]] == ["gemm", "nvjet", "Memset"]
    rows = kernels_table({"train": found}).splitlines()
    assert rows[2].split() == ["train", "products", "3.000", "60", "%", "4"]
    assert rows[4].split() == ["train", "none", "1.500", "30", "%"]


def test_a_phase_is_profiled_every_time() -> None:
    """On a CPU, where PyTorch's operators stand for kernels; nothing else is profiled."""
    watch = KernelWatch(("train",), cuda=False)
    a = torch.randn(64, 64)
    for phase in ("train", "reward", "train"):
        with watch.phase(phase):
            a @ a
    assert list(watch.found) == ["train"]
    products = [k for k in watch.found["train"].values() if group_of(k.name) == "products"]
    assert [k.calls for k in products if k.name == "aten::mm"] == [2]
    assert all(kernel.seconds > 0 for kernel in watch.found["train"].values())
