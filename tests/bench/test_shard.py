"""The shard bench's parts on a CPU and small widths; its timing needs a GPU."""

from __future__ import annotations

import pytest
import torch
from millrace_bench import v3
from millrace_bench.shard import SHARDS, build, decode_step, floor_ms, kind_of, make_pool, prefill_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(SHARDS))
def test_a_rank_runs_every_kind_of_step(name: str) -> None:
    model = build(SHARDS[name], 2, CPU, v3.TINY)
    mlp = model.layers[1].mlp
    assert mlp.routed.fuses_shared and mlp.routed.held.w13.data.shape[0] == (17 if name == "tp8" else 3)
    pool = make_pool(model, 9, CPU, torch.bfloat16)
    for inputs in (decode_step(model, 3, 100, CPU), prefill_step(model, 2, 70, CPU)):
        logits = model.logits(model.forward(inputs, pool)[inputs.sample_rows])
        assert logits.isfinite().all() and logits.shape == (len(inputs.attn.q_lens_host), model.config.vocab_size)
        assert floor_ms(model, inputs) > 0


def test_every_choice_lands_on_this_rank() -> None:
    held = build(SHARDS["ep8"], 2, CPU, v3.TINY).layers[1].mlp.routed.held
    assert held.num_experts == 2
    assert held.slots(torch.tensor([[0, 5, 14, -1]], dtype=torch.int32)).tolist() == [[0, 1, 0, -1]]


def test_the_last_layer_is_that_of_an_engine_with_an_exchange() -> None:
    """Only a replica that is alone may leave out rows that are not sampled."""
    tp8, ep8 = (build(SHARDS[name], 2, CPU, v3.TINY).layers[-1] for name in ("tp8", "ep8"))
    assert tp8.sampled_only and not ep8.sampled_only


def test_kernels_by_kind() -> None:
    assert kind_of("sm90_fp8_gemm_1d2d_impl<...>") == "fp8 gemm"
    assert kind_of("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, cutlass::gemm") == "fp8 gemm"
    assert kind_of("combine_kernel") == kind_of("dispatch_kernel") == "exchange"
    assert kind_of("_add_rms_norm_kernel") == "norm"
    assert kind_of("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT") == "bf16 gemm"
    assert kind_of("_combine_kernel") == kind_of("_route_few_kernel") == "experts, our kernels"
    assert kind_of("void legacy::smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t>") == "attention"
    assert kind_of("something new") == "other"
