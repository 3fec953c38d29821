"""The shard bench's parts on a CPU and small widths; its timing needs a GPU."""

import json

import pytest
import torch
from millrace_bench import v3
from millrace_bench.shard import SHARDS, build, decode_step, floor_ms, kind_of, main, make_pool, prefill_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(SHARDS))
def test_a_rank_runs_every_kind_of_step(name: str) -> None:
    model = build(SHARDS[name], 2, CPU, v3.TINY)
    mlp = model.layers[1].mlp
    assert mlp.routed.fuses_shared and mlp.routed.held.w13.data.shape[0] == (3 if name == "ep8" else 17)
    pool = make_pool(model, 9, CPU, torch.bfloat16)
    for inputs in (decode_step(model, 3, 100, CPU), prefill_step(model, 2, 70, CPU)):
        logits = model.logits(model.forward(inputs, pool)[inputs.sample_rows])
        assert logits.isfinite().all() and logits.shape == (len(inputs.attn.q_lens_host), model.config.vocab_size)
        assert floor_ms(model, inputs) > 0


def test_sparse_attention_beside_dense(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "shard --shard tp8 --layers 2 --tiny --repeats 1 --decode 2x200 --prefill 1x150 --attention dense sparse"
    monkeypatch.setattr("sys.argv", command.split())
    main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["rows"]
    assert [(row["attention"], row["kind"]) for row in rows] == [
        (attention, kind) for attention in ("dense", "sparse") for kind in ("decode", "prefill")
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)


def test_the_floor_of_long_contexts_is_lower_with_sparse_attention() -> None:
    floors = []
    for widths in ({}, v3.SPARSE | {"index_topk": 64}):
        model = build(SHARDS["tp8"], 2, CPU, v3.TINY | widths)
        floors.append([floor_ms(model, decode_step(model, 8, length, CPU)) for length in (60, 500)])
    (dense_short, dense_long), (sparse_short, sparse_long) = floors
    assert sparse_long - sparse_short < 0.5 * (dense_long - dense_short) and sparse_short > dense_short


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
    assert kind_of("void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u, 128u>") == kind_of("_slots") == "indexer"
    assert kind_of("something new") == "other"
